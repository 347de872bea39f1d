// Draws a board as Grafana does: its field overrides, transformations, reducers and components, without
// its server. window.INPUT has the board, the answer to each query, the range of time and the theme.
//
// What Grafana keeps in its server and not in its libraries is short, and stands here: how an answer of
// Prometheus becomes a frame, the defaults of a panel's options, and the grid.
import inter from '@fontsource/inter/files/inter-latin-400-normal.woff2';
import interMedium from '@fontsource/inter/files/inter-latin-500-normal.woff2';
import { createRoot } from 'react-dom/client';
import { firstValueFrom } from 'rxjs';
import {
  FieldColorModeId, FieldType, Registry, ThemeContext, applyFieldOverrides, createTheme, dateTime,
  getDisplayProcessor, getDisplayValueAlignmentFactors, getFieldDisplayName, getFieldDisplayValues,
  getFieldSeriesColor, standardTransformers, standardTransformersRegistry, toDataFrame, transformDataFrame,
} from '@grafana/data';
import { BarGauge } from 'grafana-ui/components/BarGauge/BarGauge.mjs';
import { BigValue } from 'grafana-ui/components/BigValue/BigValue.mjs';
import { PanelContextProvider } from 'grafana-ui/components/PanelChrome/PanelContext.mjs';
import { Table } from 'grafana-ui/components/Table/Table.mjs';
import { VizRepeater } from 'grafana-ui/components/VizRepeater/VizRepeater.mjs';
import { TimeSeries } from 'grafana-ui/graveyard/TimeSeries/TimeSeries.mjs';
import { GlobalStyles } from 'grafana-ui/themes/GlobalStyles/GlobalStyles.mjs';

const { board, answers, from, to, step, dark, width } = window.INPUT;
const theme = createTheme({ colors: { mode: dark ? 'dark' : 'light' } });
const timeZone = 'utc';
const range = { from: dateTime(from * 1000), to: dateTime(to * 1000), raw: { from: 'now-1h', to: 'now' } };
const drawn = {};

// ---- Grafana's registries, which its server fills ---------------------------------------------------

const { mergeTransformer, organizeFieldsTransformer, sortByTransformer } = standardTransformers;
const transformers = [mergeTransformer, organizeFieldsTransformer, sortByTransformer];
standardTransformersRegistry.setInit(() =>
  transformers.map((transformation) => ({ id: transformation.id, name: transformation.name, transformation }))
);
const property = (id, path, isCustom) => ({
  id, path, isCustom, name: id, process: (value) => value, shouldApply: () => true,
});
const STANDARD = 'unit min max decimals displayName noValue links mappings thresholds color'.split(' ');
// The defaults of panels: the server has them in each panel's plugin.
const LINES = {
  drawStyle: 'line', lineWidth: 1, lineInterpolation: 'linear', fillOpacity: 0, gradientMode: 'none',
  showPoints: 'auto', pointSize: 5, spanNulls: false, axisPlacement: 'auto', axisBorderShow: false,
  axisCenteredZero: false, axisSoftMin: undefined, axisSoftMax: undefined, axisColorMode: 'text', axisLabel: '', barAlignment: 0, barWidthFactor: 0.6,
  scaleDistribution: { type: 'linear' }, stacking: { mode: 'none', group: 'A' },
  hideFrom: { legend: false, tooltip: false, viz: false }, lineStyle: { fill: 'solid' }, thresholdsStyle: { mode: 'off' },
};
const CELLS = { cellOptions: { type: 'auto' }, align: 'auto', inspect: false, minWidth: 150, width: undefined, hidden: false };
const fieldConfigRegistry = new Registry(() => [
  ...STANDARD.map((id) => property(id, id, false)),
  ...Object.keys({ ...LINES, ...CELLS }).map((name) => property(`custom.${name}`, name, true)),
]);
const DEFAULT_CUSTOM = { timeseries: LINES, table: CELLS };
const DEFAULT_COLOUR = { timeseries: FieldColorModeId.PaletteClassic };

function defaultsOf(panel) {
  const { defaults = {} } = panel.fieldConfig ?? {};
  const color = { mode: DEFAULT_COLOUR[panel.type] ?? FieldColorModeId.Thresholds };
  return { color, ...defaults, custom: { ...DEFAULT_CUSTOM[panel.type], ...defaults.custom } };
}

// ---- from Prometheus to fields ----------------------------------------------------------------------

const legend = (format, labels) => format.replace(/{{\s*(\w+)\s*}}/g, (_, name) => labels[name] ?? '');

function tableFrame(target, series, isOnly) {
  const names = [...new Set(series.flatMap(({ metric }) => Object.keys(metric)))].sort();
  const label = (name) => ({ name, type: FieldType.string, values: series.map(({ metric }) => metric[name]) });
  return toDataFrame({ refId: target.refId, fields: [
    { name: 'Time', type: FieldType.time, values: series.map(({ value }) => value[0] * 1000) },
    ...names.map(label),
    { name: isOnly ? 'Value' : `Value #${target.refId}`, type: FieldType.number, values: series.map(({ value }) => +value[1]) },
  ] });
}

function seriesFrame(target, { metric, values, value }) {
  const points = values ?? [value];
  const name = legend(target.legendFormat, metric);
  const interval = values ? step * 1000 : undefined; // a gap longer than that is drawn as one
  return toDataFrame({ refId: target.refId, name, fields: [
    { name: 'Time', type: FieldType.time, config: { interval }, values: points.map((point) => point[0] * 1000) },
    { name: 'Value', type: FieldType.number, labels: metric, config: { displayNameFromDS: name },
      values: points.map((point) => +point[1]) },
  ] });
}

async function framesOf(panel) {
  const raw = panel.targets.flatMap((target, number) => {
    const series = answers[panel.id][number];
    if (target.format !== 'table') return series.map((one) => seriesFrame(target, one));
    return series.length ? [tableFrame(target, series, panel.targets.length === 1)] : [];
  });
  const transformations = panel.transformations ?? [];
  const data = raw.length && transformations.length ? await firstValueFrom(transformDataFrame(transformations, raw)) : raw;
  const fieldConfig = { defaults: defaultsOf(panel), overrides: panel.fieldConfig?.overrides ?? [] };
  const replaceVariables = (text) => text;
  return applyFieldOverrides({ data, fieldConfig, replaceVariables, theme, fieldConfigRegistry, timeZone });
}

// ---- panels -----------------------------------------------------------------------------------------

const valuesOf = (panel, data) => () => getFieldDisplayValues({
  fieldConfig: { defaults: defaultsOf(panel), overrides: [] }, data, theme, timeZone,
  reduceOptions: { calcs: ['lastNotNull'], values: false, ...panel.options?.reduceOptions },
  replaceVariables: (text) => text, sparkline: panel.type === 'stat' && panel.options?.graphMode !== 'none',
});

function Stat({ panel, data, width, height }) {
  const { colorMode = 'value', graphMode = 'area', justifyMode = 'auto', textMode = 'auto' } = panel.options ?? {};
  const draw = ({ value, width, height, count, alignmentFactors }) => (
    <BigValue value={value.display} sparkline={value.sparkline} {...{ width, height, count, alignmentFactors, theme }}
      {...{ colorMode, graphMode, justifyMode, textMode }} wideLayout={panel.options?.wideLayout ?? true} />
  );
  return (
    <VizRepeater getValues={valuesOf(panel, data)} getAlignmentFactors={getDisplayValueAlignmentFactors} renderValue={draw}
      {...{ width, height }} source={data} itemSpacing={3} autoGrid orientation={panel.options?.orientation ?? 'auto'} renderCounter={0} />
  );
}

function Bars({ panel, data, width, height }) {
  const { orientation = 'auto', displayMode = 'gradient', valueMode = 'color', showUnfilled = true } = panel.options ?? {};
  const { minVizHeight = 16, minVizWidth = 8, maxVizHeight = 300, namePlacement = 'auto' } = panel.options ?? {};
  const draw = ({ value, width, height, orientation, alignmentFactors }) => (
    <BarGauge value={value.display} field={value.field} display={value.view?.getFieldDisplayProcessor(value.colIndex)}
      {...{ width, height, orientation, alignmentFactors, theme, displayMode, showUnfilled, namePlacement }}
      valueDisplayMode={valueMode} itemSpacing={10} lcdCellWidth={12} />
  );
  return (
    <VizRepeater getValues={valuesOf(panel, data)} getAlignmentFactors={getDisplayValueAlignmentFactors} renderValue={draw}
      {...{ width, height, minVizHeight, minVizWidth, maxVizHeight, orientation }} source={data} itemSpacing={10} renderCounter={0} />
  );
}

const Cells = ({ panel, data, width, height }) => (
  <Table data={data[0]} {...{ width, height }} timeRange={range} initialSortBy={panel.options?.sortBy} showTypeIcons={false} />
);

function Lines({ panel, data, width, height }) {
  data.flatMap((frame) => frame.fields).filter((field) => field.type === FieldType.number).forEach((field, seriesIndex) => {
    field.state = { ...field.state, seriesIndex };
    field.display = getDisplayProcessor({ field, theme, timeZone });
  });
  const report = (config) => {
    config.addHook('draw', (plot) => {
      const axis = plot.axes.find(({ scale }) => scale !== 'x');
      drawn[panel.id].axis = axis?._values?.filter((value) => value !== null) ?? [];
    });
    return null;
  };
  const look = { displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [], ...panel.options?.legend };
  return <TimeSeries frames={data} timeRange={range} timeZone={timeZone} {...{ width, height }} legend={look}>{report}</TimeSeries>;
}

const KINDS = { stat: Stat, bargauge: Bars, table: Cells, timeseries: Lines };

function Body({ panel, data, width, height }) {
  const Kind = KINDS[panel.type];
  const note = !Kind ? `${panel.type}: not in Grafana's libraries` : data.length || Kind === Stat ? '' : 'No data';
  const middle = { display: 'flex', height, alignItems: 'center', justifyContent: 'center', color: theme.colors.text.secondary };
  return note ? <div style={middle}>{note}</div> : <Kind {...{ panel, data, width, height }} />;
}

// Each value of a series, and its colour by Grafana's own display processor and series colours.
function seriesOf(panel, data) {
  return data.flatMap((frame) => frame.fields.filter(({ type }) => type === FieldType.number).map((field) => {
    const display = field.display ?? getDisplayProcessor({ field, theme, timeZone });
    const value = field.values[field.values.length - 1];
    const last = display(value);
    return {
      name: getFieldDisplayName(field, frame, data), labels: field.labels ?? {},
      stroke: getFieldSeriesColor(field, theme).color,
      points: frame.fields[0].values.map((time, number) => [time, field.values[number]]),
      value, last: [last.prefix, last.text, last.suffix].join(''), percent: last.percent ?? null,
    };
  }));
}

// ---- the grid, and what stands on it ----------------------------------------------------------------

const MARGIN = 8, EDGE = 16, CELL = 30, HEADER = 32;
const column = (width - 2 * EDGE - 23 * MARGIN) / 24;
const place = ({ x, y, w, h }) => ({
  position: 'absolute', left: EDGE + x * (column + MARGIN), top: EDGE + y * (CELL + MARGIN),
  width: w * column + (w - 1) * MARGIN, height: h * CELL + (h - 1) * MARGIN,
});

function Framed({ panel, data }) {
  const where = place(panel.gridPos);
  const inside = { width: where.width - 2 - 2 * MARGIN, height: where.height - 2 - HEADER - MARGIN };
  const frame = { background: theme.colors.background.primary, border: `1px solid ${theme.colors.border.weak}`, borderRadius: 2 };
  return (
    <section id={`panel-${panel.id}`} style={{ ...where, ...frame, overflow: 'hidden' }}>
      <h2 style={{ height: HEADER, lineHeight: `${HEADER}px`, margin: 0, padding: '0 8px', fontSize: 14, fontWeight: 500 }}>{panel.title}</h2>
      <div style={{ padding: `0 ${MARGIN}px ${MARGIN}px` }}><Body {...{ panel, data }} {...inside} /></div>
    </section>
  );
}

const Heading = ({ panel }) => (
  <h1 id={`panel-${panel.id}`} style={{ ...place(panel.gridPos), margin: 0, fontSize: 16, fontWeight: 500 }}>
    {panel.collapsed ? '›' : '⌄'} {panel.title}{panel.collapsed ? ` (${panel.panels.length} panels)` : ''}
  </h1>
);

// What a reader sees of a panel: each text with its colour, and whether it is cut.
function textsOf(section) {
  const leaves = [...section.querySelectorAll('*')].filter((element) =>
    [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.textContent.trim()));
  return leaves.filter((element) => element.tagName !== 'H2').map((element) => {
    const style = getComputedStyle(element);
    const backgrounds = [];
    for (let outer = element; outer !== section; outer = outer.parentElement) backgrounds.push(getComputedStyle(outer).background);
    return {
      text: element.textContent.trim(), colour: style.color, size: parseFloat(style.fontSize),
      background: backgrounds.find((one) => !one.startsWith('rgba(0, 0, 0, 0) none')) ?? '',
      cut: (element.scrollWidth > element.clientWidth + 1 && style.overflow === 'hidden')
        || element.getBoundingClientRect().right > section.getBoundingClientRect().right + 1,
    };
  });
}

window.read = () => board.panels.filter(({ type }) => type !== 'row').map((panel) => ({
  title: panel.title, type: panel.type, ...drawn[panel.id], texts: textsOf(document.getElementById(`panel-${panel.id}`)),
}));

async function main() {
  for (const [weight, font] of [['400', inter], ['500', interMedium]]) {
    document.fonts.add(await new FontFace('Inter', `url(${font})`, { weight }).load());
  }
  const items = await Promise.all(board.panels.map(async (panel) => {
    if (panel.type === 'row') return <Heading key={panel.id} panel={panel} />;
    const data = await framesOf(panel);
    drawn[panel.id] = { series: seriesOf(panel, data) };
    return <Framed key={panel.id} {...{ panel, data }} />;
  }));
  const bottom = Math.max(...board.panels.map(({ gridPos }) => gridPos.y + gridPos.h));
  Object.assign(document.body.style, {
    margin: 0, background: theme.colors.background.canvas, color: theme.colors.text.primary,
    font: `${theme.typography.fontSize}px/1.57 ${theme.typography.fontFamily}`,
  });
  const context = { eventBus: { getStream: () => ({ pipe: () => ({ subscribe: () => ({}) }), subscribe: () => ({}) }), publish() {} }, eventsScope: 'board' };
  createRoot(document.getElementById('root')).render(
    <ThemeContext.Provider value={theme}>
      <PanelContextProvider value={context}>
        <GlobalStyles />
        <main style={{ position: 'relative', width, height: 2 * EDGE + bottom * (CELL + MARGIN) }}>{items}</main>
      </PanelContextProvider>
    </ThemeContext.Provider>
  );
}

const settled = (error = '') => setTimeout(() => { window.ready = { error }; }, 100);
main().then(() => requestAnimationFrame(() => settled()), (error) => settled(error.stack));
