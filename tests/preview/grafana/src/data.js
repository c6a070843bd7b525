// Turns a panel's JSON into data frames for Grafana's components: variables, PromQL, transformations, field config.
import {
  applyFieldOverrides,
  createDataFrame,
  FieldConfigOptionsRegistry,
  FieldType,
  getFieldDisplayName,
  standardTransformers,
  standardTransformersRegistry,
  transformDataFrame,
} from '@grafana/data';
import { lastValueFrom } from 'rxjs';

// Grafana's server has the list of standard options. An option that is missing here would be ignored without an error.
const STANDARD = ['unit', 'decimals', 'min', 'max', 'mappings', 'thresholds', 'color', 'noValue', 'displayName', 'links', 'filterable'];
const CUSTOM = [
  'width', 'cellOptions', 'fillOpacity', 'lineWidth', 'stacking', 'drawStyle', 'showPoints', 'spanNulls', 'axisSoftMax',
  'thresholdsStyle', 'hidden', 'align',
];
const item = (id, path, isCustom) => ({ id, path, isCustom, name: id, process: (v) => v, shouldApply: () => true, override: () => null, editor: () => null });
const registry = new FieldConfigOptionsRegistry(() => [
  ...STANDARD.map((id) => item(id, id, false)),
  ...CUSTOM.map((id) => item(`custom.${id}`, id, true)),
]);
const DEFAULTS = {
  timeseries: { custom: { drawStyle: 'line' }, color: { mode: 'palette-classic' } },
  table: { custom: { cellOptions: { type: 'auto' } } },
};
standardTransformersRegistry.setInit(() =>
  [...new Map(Object.values(standardTransformers).map((t) => [t.id, t])).values()].map((t) => ({
    id: t.id, name: t.name, transformation: async () => t,
  }))
);

export function fill(text, values, rangeS, stepS) {
  const all = {
    ...values,
    __rate_interval: `${Math.max(stepS + 60, 240)}s`,
    __range: `${rangeS}s`,
    __interval: `${stepS}s`,
  };
  return text.replace(/\$\{?(\w+)\}?/g, (whole, name) => all[name] ?? whole);
}

async function ask(path, form) {
  const answer = await fetch(`/prom/api/v1/${path}?${new URLSearchParams(form)}`);
  const body = await answer.json();
  if (body.status !== 'success') {
    throw new Error(body.error);
  }
  return body.data.result;
}

function legend(format, labels) {
  return format ? format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '').trim() : undefined;
}

function overTime(target, result, from, to, step) {
  return result.map((series) => {
    const known = new Map(series.values.map(([t, v]) => [Math.round(t), Number(v)]));
    const times = [];
    const values = [];
    for (let t = from; t <= to; t += step) {
      times.push(t * 1000);
      values.push(known.get(t) ?? null); // a gap remains a gap
    }
    const { __name__, ...labels } = series.metric;
    return createDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: times, config: {} },
        { name: 'Value', type: FieldType.number, values, labels, config: { displayNameFromDS: legend(target.legendFormat, labels) } },
      ],
    });
  });
}

function now(target, result, many, to) {
  if (target.format === 'table') {
    const names = [...new Set(result.flatMap((row) => Object.keys(row.metric)))].filter((name) => name !== '__name__').sort();
    return [
      createDataFrame({
        refId: target.refId,
        fields: [
          { name: 'Time', type: FieldType.time, values: result.map(() => to * 1000), config: {} },
          ...names.map((name) => ({ name, type: FieldType.string, values: result.map((row) => row.metric[name] ?? ''), config: {} })),
          { name: many ? `Value #${target.refId}` : 'Value', type: FieldType.number, values: result.map((row) => Number(row.value[1])), config: {} },
        ],
      }),
    ];
  }
  return result.map((row) => {
    const { __name__, ...labels } = row.metric;
    return createDataFrame({
      refId: target.refId,
      fields: [
        { name: 'Time', type: FieldType.time, values: [to * 1000], config: {} },
        { name: 'Value', type: FieldType.number, values: [Number(row.value[1])], labels, config: { displayNameFromDS: legend(target.legendFormat, labels) } },
      ],
    });
  });
}

function infinite(config) {
  for (const where of [config, ...(config.overrides ?? []).flatMap((o) => o.properties.filter((p) => p.id === 'thresholds').map((p) => p.value))]) {
    for (const step of (where.defaults ?? where).thresholds?.steps ?? where.steps ?? []) {
      step.value = step.value ?? -Infinity;
    }
  }
  return config;
}

// The frames of a panel; `values`: the values of the dashboard's variables.
export async function load(panel, values, { from, to }, theme, width) {
  const step = Math.max(60, Math.ceil((to - from) / Math.max(width, 100) / 60) * 60);
  const end = Math.floor(to / 60) * 60;
  const start = Math.ceil(from / 60) * 60;
  let frames = [];
  for (const target of panel.targets) {
    const query = fill(target.expr, values, to - from, step);
    frames = frames.concat(
      target.instant
        ? now(target, await ask('query', { query, time: end }), panel.targets.length > 1, end)
        : overTime(target, await ask('query_range', { query, start, end, step }), start, end, step)
    );
  }
  if (panel.transformations) {
    frames = await lastValueFrom(transformDataFrame(panel.transformations, frames));
  }
  const base = DEFAULTS[panel.type] ?? {};
  const config = infinite(structuredClone(panel.fieldConfig));
  config.overrides = config.overrides ?? [];
  config.defaults = { ...base, ...config.defaults, custom: { ...base.custom, ...config.defaults.custom } };
  const shown = applyFieldOverrides({
    data: frames, fieldConfig: config, fieldConfigRegistry: registry, theme, timeZone: 'utc', replaceVariables: (text) => text,
  });
  for (const frame of shown) {
    for (const field of frame.fields) {
      getFieldDisplayName(field, frame, shown); // fills the cache that the table's header reads
    }
  }
  return { frames: shown, config };
}
