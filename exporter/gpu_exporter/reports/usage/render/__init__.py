"""The forms of a usage report: text, HTML, mail, JSON and tables of values. The same report gives the same bytes."""
