"""Names the user of a job. Pure.

Slurm prints `nobody` for every uid that its host cannot resolve (uid_to_string of src/common/uid.c), other tools print
nothing, `(null)`, `Unknown` or the number itself. Two users would share such a placeholder, so the exporter shows the
uid.
"""

from __future__ import annotations

from gpu_exporter.common.outside import WHOLE_MAX, whole

PLACEHOLDERS = frozenset(("", "(null)", "null", "n/a", "unknown", "nobody", "nfsnobody"))
NOBODY = "65534"  # the kernel's overflow uid, the only uid whose own name is nobody or nfsnobody
UID_MAX = 2**32 - 3  # the two numbers above it are NO_VAL and INFINITE of slurm.h, which mean an unset uid


def read_uid(text: str) -> str:
    """Returns a uid in decimal digits, "" for an unset uid and for any other text."""
    uid = whole(text, UID_MAX)
    return "" if uid is None else str(uid)


def is_placeholder(name: str, uid: str) -> bool:
    """Returns whether a name is a placeholder that Slurm prints for a user without a name. `uid`: "" if unknown."""
    word = name.strip().casefold()
    if word in PLACEHOLDERS:
        return not (word.endswith("nobody") and uid == NOBODY)
    return whole(word, WHOLE_MAX) is not None


def name_uid(name: str, uid: str) -> str:
    """Returns `uid:1001` for the user with the placeholder `name`, "" if the uid is unknown too."""
    known = read_uid(uid) or read_uid(name.strip())  # a name of digits is the uid
    return f"uid:{known}" if known else ""


def name_user(name: str, uid: str) -> str:
    """Returns the name of a user, or `uid:1001` if `name` is a placeholder. "" if both are unknown.

    >>> name_user("ada", "1001"), name_user("nobody", "1001"), name_user("nobody", "65534"), name_user("nobody", "")
    ('ada', 'uid:1001', 'nobody', '')
    """
    return name_uid(name, uid) if is_placeholder(name, uid) else name
