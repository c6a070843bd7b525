// One component for each type of panel. Grafana publishes most of them. Timelines and heat maps are part of its server, so
// they are written here, in Grafana's colours.
import { getDisplayValueAlignmentFactors, getFieldDisplayValues, VizOrientation } from '@grafana/data';
import { BarGauge, BigValue, BigValueColorMode, BigValueGraphMode, BigValueJustifyMode, BigValueTextMode, TimeSeries, VizLegend, VizRepeater } from '@grafana/ui';
import { TableNG } from '@grafana/ui/unstable';
import React from 'react';

function figures({ panel, frames, config, theme, size }, draw, orientation) {
  const values = () =>
    getFieldDisplayValues({
      data: frames, fieldConfig: config, reduceOptions: panel.options.reduceOptions ?? { calcs: ['lastNotNull'], values: false },
      replaceVariables: (text) => text, theme, timeZone: 'utc',
    });
  return (
    <VizRepeater
      width={size.width} height={size.height} source={frames} getValues={values} orientation={orientation} itemSpacing={4}
      getAlignmentFactors={getDisplayValueAlignmentFactors} renderCounter={0} minVizHeight={16} maxVizHeight={32} autoGrid={orientation === VizOrientation.Auto}
      renderValue={draw}
    />
  );
}

function Stat(props) {
  const { textMode = BigValueTextMode.Auto, text } = props.panel.options;
  return figures(props, ({ value, width, height, alignmentFactors }) => (
    <BigValue
      value={value.display} width={width} height={height} theme={props.theme} colorMode={BigValueColorMode.Value} alignmentFactors={alignmentFactors}
      graphMode={BigValueGraphMode.None} justifyMode={BigValueJustifyMode.Auto} textMode={textMode} text={text}
    />
  ), VizOrientation.Auto);
}

function Bars(props) {
  return figures(props, ({ value, width, height, orientation, alignmentFactors }) => (
    <BarGauge
      value={value.display} field={value.field} width={width} height={height} orientation={orientation} theme={props.theme} itemSpacing={8} lcdCellWidth={12}
      displayMode={props.panel.options.displayMode} display={value.view?.getFieldDisplayProcessor(value.colIndex)} alignmentFactors={alignmentFactors}
      namePlacement={props.panel.options.namePlacement}
    />
  ), VizOrientation.Horizontal);
}

function Graph({ panel, frames, size, range }) {
  return (
    <TimeSeries frames={frames} width={size.width} height={size.height} timeRange={range} timeZone="utc" structureRev={1} legend={{ calcs: [], ...panel.options.legend }} options={{}} />
  );
}

function Rows({ panel, frames, size }) {
  const [frame] = frames;
  return (
    <TableNG data={frame} width={size.width} height={size.height} enableVirtualization={false} initialSortBy={panel.options.sortBy} noHeader={false} cellHeight="sm" />
  );
}

const PAD = 8;
const TICKS = 6;

function clock(ms) {
  return new Date(ms).toISOString().slice(11, 16);
}

function Axis({ from, to, left, width, y, theme }) {
  const ticks = Array.from({ length: TICKS + 1 }, (_, i) => from + ((to - from) * i) / TICKS);
  return ticks.map((t, i) => (
    <text key={t} x={left + (width * i) / TICKS} y={y} fontSize="11" textAnchor={i === TICKS ? 'end' : i ? 'middle' : 'start'} fill={theme.colors.text.secondary}>{clock(t)}</text>
  ));
}

function Timeline({ frames, size, theme, range }) {
  const rows = frames.flatMap((frame) => frame.fields.filter((f) => f.type === 'number').map((field) => ({ frame, field, name: field.state?.displayName ?? field.config.displayNameFromDS ?? '' })));
  rows.sort((a, b) => a.name.localeCompare(b.name, 'en', { numeric: true }));
  const left = Math.min(260, 12 + 6.4 * Math.max(0, ...rows.map((row) => row.name.length)));
  const wide = size.width - left - PAD;
  const high = (size.height - 46) / Math.max(1, rows.length);
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  const seen = new Map();
  const runs = rows.flatMap(({ frame, field }, row) => {
    const times = frame.fields[0].values;
    const found = [];
    let begun = null;
    times.forEach((t, i) => {
      const value = field.values[i];
      const shown = value == null ? null : field.display(value);
      if (shown) { seen.set(shown.text, shown.color); }
      const next = i + 1 < times.length ? times[i + 1] : to;
      if (begun && shown && begun.text === shown.text) { begun.to = next; } else { begun = shown && { row, text: shown.text, color: shown.color, from: t, to: next }; if (begun) { found.push(begun); } }
    });
    return found;
  });
  const x = (t) => left + (wide * (t - from)) / (to - from);
  return (
    <div>
      <svg width={size.width} height={size.height - 24} fontFamily="Inter Variable, sans-serif">
        {rows.map((row, i) => <text key={i} x={left - PAD} y={high * (i + 0.5) + 4} fontSize="11" textAnchor="end" fill={theme.colors.text.primary}>{row.name}</text>)}
        {runs.map((run, i) => (
          <rect key={i} x={x(run.from)} y={high * run.row + high * 0.1} width={Math.max(1, x(run.to) - x(run.from))} height={high * 0.8} fill={theme.visualization.getColorByName(run.color)} />
        ))}
        <Axis from={from} to={to} left={left} width={wide} y={size.height - 30} theme={theme} />
      </svg>
      <VizLegend placement="bottom" displayMode="list" items={[...seen].map(([label, color]) => ({ label, color, yAxis: 1 }))} />
    </div>
  );
}

function Heat({ frames, size, theme, range }) {
  const columns = frames.map((frame) => ({ le: Number(frame.fields[1].labels.le), times: frame.fields[0].values, values: frame.fields[1].values })).sort((a, b) => a.le - b.le);
  const [from, to] = [range.from.valueOf(), range.to.valueOf()];
  const cells = columns.map(({ values }, i) => Array.from(values, (v, t) => (v == null ? null : v - (i ? columns[i - 1].values[t] ?? 0 : 0))));
  const most = Math.max(1, ...cells.flat().filter((v) => v != null));
  const [left, high] = [48, (size.height - 30) / columns.length];
  const wide = (size.width - left - PAD) / columns[0].times.length;
  return (
    <svg width={size.width} height={size.height} fontFamily="Inter Variable, sans-serif">
      {columns.map(({ le }, row) => <text key={le} x={left - PAD} y={size.height - 30 - high * (row + 0.5) + 4} fontSize="11" textAnchor="end" fill={theme.colors.text.secondary}>{Math.round(le * 100)}%</text>)}
      {cells.flatMap((row, i) => row.map((v, t) => v ? <rect key={`${i} ${t}`} x={left + wide * t} y={size.height - 30 - high * (i + 1)} width={wide + 0.5} height={high} fill="#4292c6" opacity={0.12 + (0.88 * v) / most} /> : null))}
      <Axis from={from} to={to} left={left} width={size.width - left - PAD} y={size.height - 10} theme={theme} />
    </svg>
  );
}

export const KINDS = { stat: Stat, bargauge: Bars, timeseries: Graph, table: Rows, 'state-timeline': Timeline, heatmap: Heat };
