// Bundles draw.jsx with Grafana's components into one script: node bundle.mjs, beside node_modules.
import { readFileSync } from 'node:fs';
import { build } from 'esbuild';

// Editors, maps and menus, which no panel here opens, are left out: whatever is read of them is nothing.
const { overrides } = JSON.parse(readFileSync('package.json'));
const absent = new RegExp(`^(${Object.keys(overrides).join('|')})(/|$)`);
const NOTHING = `
  const nothing = new Proxy(function () {}, {
    get: (_, name) => (typeof name === 'symbol' ? undefined : name === '__esModule' ? false : nothing),
    apply: () => nothing,
    construct: () => nothing,
  });
  module.exports = Object.create(nothing);
`;
const leaveOut = {
  name: 'leave-out',
  setup(bundler) {
    bundler.onResolve({ filter: absent }, ({ path }) => ({ path, namespace: 'absent' }));
    bundler.onLoad({ filter: /./, namespace: 'absent' }, () => ({ contents: NOTHING, loader: 'js' }));
  },
};

// A module of CommonJS has its default export under `default`, which an importer named .mjs does not see.
const unwrap = {
  name: 'unwrap',
  setup(bundler) {
    bundler.onResolve({ filter: /^react-custom-scrollbars-2$/ }, ({ path, namespace, resolveDir }) =>
      namespace === 'file' ? { path, namespace: 'unwrap', pluginData: resolveDir } : undefined);
    bundler.onLoad({ filter: /./, namespace: 'unwrap' }, ({ path, pluginData }) =>
      ({ contents: `export * from '${path}'; export { default } from '${path}';`, resolveDir: pluginData }));
  },
};

await build({
  entryPoints: ['draw.jsx'], outfile: 'draw.js', bundle: true, format: 'iife', jsx: 'automatic', minify: true,
  alias: { 'grafana-ui': './node_modules/@grafana/ui/dist/esm' }, plugins: [leaveOut, unwrap], logLevel: 'error',
  define: { 'process.env.NODE_ENV': '"production"', global: 'window' }, loader: { '.svg': 'dataurl', '.woff2': 'dataurl', '.css': 'empty' },
});
