// Shows one dashboard: ?dash=URL of its JSON &from= &to= (Unix seconds) &theme=dark|light &var-NAME=VALUE
// Each panel carries data-state: ok, nodata, error or unsupported; <html data-ready="1"> is set when all panels are drawn.
import '@fontsource-variable/inter';
import 'uplot/dist/uPlot.min.css';
import { createTheme, dateTime, ThemeContext } from '@grafana/data';
import { initPluginTranslations } from '@grafana/i18n';
import { GlobalStyles, PanelChrome } from '@grafana/ui';
import React from 'react';
import { createRoot } from 'react-dom/client';
import { load } from './data.js';
import { KINDS } from './viz.jsx';

const [COLUMNS, ROW, GAP] = [24, 30, 8];
const asked = new URLSearchParams(location.search);
const theme = createTheme({ colors: { mode: asked.get('theme') ?? 'dark' } });
const span = { from: Number(asked.get('from')), to: Number(asked.get('to')) };
const range = { from: dateTime(span.from * 1000), to: dateTime(span.to * 1000), raw: { from: 'now-6h', to: 'now' } };

class Boundary extends React.Component {
  state = {};
  static getDerivedStateFromError(error) { return { error }; }
  componentDidCatch(error) { this.props.onError(error); }
  render() { return this.state.error ? <pre>{String(this.state.error)}</pre> : this.props.children; }
}

function Panel({ panel, values, width, onDone }) {
  const [state, setState] = React.useState({ name: 'loading' });
  const place = panel.gridPos;
  const box = {
    position: 'absolute', left: (place.x ?? 0) * (width / COLUMNS), top: (place.y ?? 0) * (ROW + GAP),
    width: place.w * (width / COLUMNS) - GAP, height: place.h * (ROW + GAP) - GAP,
  };
  React.useEffect(() => {
    const finish = (next) => { setState(next); onDone(); };
    if (!KINDS[panel.type]) { finish({ name: 'unsupported' }); return; }
    load(panel, values, span, theme, box.width)
      .then((data) => finish({ name: data.frames.some((f) => f.length > 0) ? 'ok' : 'nodata', ...data }))
      .catch((error) => finish({ name: 'error', error }));
  }, []);
  const Kind = KINDS[panel.type];
  return (
    <div style={box} data-panel-id={panel.id} data-panel-title={panel.title} data-panel-type={panel.type} data-state={state.name} data-error={state.error ? String(state.error) : undefined}>
      <PanelChrome title={panel.title} width={box.width} height={box.height} description={panel.description}>
        {(innerWidth, innerHeight) => state.name === 'ok' ? (
          <Boundary onError={(error) => setState({ name: 'error', error })}>
            <Kind panel={panel} frames={state.frames} config={state.config} theme={theme} range={range} size={{ width: innerWidth, height: innerHeight }} />
          </Boundary>
        ) : (
          <div style={{ color: theme.colors.text.secondary, padding: 8 }}>{state.name === 'nodata' ? panel.fieldConfig.defaults.noValue ?? 'No data' : String(state.error ?? state.name)}</div>
        )}
      </PanelChrome>
    </div>
  );
}

function Board({ board, values }) {
  const width = window.innerWidth - 2 * GAP;
  const panels = board.panels.filter((panel) => panel.type !== 'row');
  const left = React.useRef(panels.length);
  const done = () => { left.current -= 1; if (left.current === 0) { setTimeout(() => { document.documentElement.dataset.ready = '1'; }, 1500); } };
  return (
    <div style={{ position: 'relative', margin: GAP }}>
      {board.panels.filter((panel) => panel.type === 'row').map((row) => (
        <h4 key={row.id} style={{ position: 'absolute', top: row.gridPos.y * (ROW + GAP), color: theme.colors.text.primary }}>{row.title}</h4>
      ))}
      {panels.map((panel) => <Panel key={panel.id} panel={panel} values={values} width={width} onDone={done} />)}
    </div>
  );
}

async function main() {
  await initPluginTranslations('grafana-ui');
  const board = await (await fetch(asked.get('dash'))).json();
  const values = {};
  for (const variable of board.templating.list) {
    values[variable.name] = asked.get(`var-${variable.name}`) ?? (variable.allValue || '');
  }
  document.body.style.background = theme.colors.background.canvas;
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}><GlobalStyles /><Board board={board} values={values} /></ThemeContext.Provider>
  );
}

main();
