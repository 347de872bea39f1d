// What a tab does by itself: it reads its address, polls for changes, and moves through time.
(function () {
  // a number of a table: three digits, or all before the point; a mean of 0.9999999999999992 calls is 1
  const digits = (value) => Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value) || 1)));
  (window.dashAgGridFunctions = window.dashAgGridFunctions || {}).shown = (raw) => {
    const value = raw == null ? null : Number(raw.toPrecision(12));
    return value == null ? "n/a"
      : value.toLocaleString("en", Number.isInteger(value) ? {}
        : { minimumFractionDigits: Math.min(3, digits(value)), maximumFractionDigits: Math.min(3, digits(value)) });
  };

  // the step time of a run as a line from 0 to its maximum
  (window.dashAgGridComponentFunctions = window.dashAgGridComponentFunctions || {}).Spark = ({ value }) => {
    if (!value || value.length < 2) return "n/a";
    const top = Math.max(...value), [wide, high] = [76, 18];
    const points = value.map((v, n) => `${(n * wide) / (value.length - 1)},${high - (v / top) * (high - 2)}`).join(" ");
    const label = `step time ${(1e3 * value[0]).toPrecision(3)} to ${(1e3 * value.at(-1)).toPrecision(3)} ms, at most ${(1e3 * top).toPrecision(3)} ms`;
    return React.createElement("svg", { width: wide, height: high, className: "spark", role: "img", "aria-label": label },
      React.createElement("title", {}, label),
      React.createElement("polyline", { points, fill: "none", stroke: "currentColor", strokeWidth: 1.5 }));
  };

  const dash = (window.dash_clientside = window.dash_clientside || {});
  const skip = () => dash.no_update;
  let shown = null; // the route that the page on screen is of
  let busy = false;
  // the cursor that a page has, and the last answer to it: Dash drops the result of a poll that takes longer than a
  // tick, and the same points would be asked for and drawn again
  let answered = { from: "", next: null };
  let playing = null;
  let held = false; // a mouse button, on a chart: new points would end the drag

  const split = (route) => {
    const [path, query] = (route || "/").split("?");
    return [path, new URLSearchParams(query || "")];
  };
  const joined = (path, query) => path + (query.toString() ? "?" + query.toString() : "");
  const searched = (change) => {
    const query = new URLSearchParams(window.location.search);
    change(query);
    const made = query.toString() ? "?" + query.toString() : "";
    return made === window.location.search || decodeURIComponent(made) === decodeURIComponent(window.location.search)
      ? skip() : made;
  };
  const ofSteps = (text) =>
    searched((query) => {
      put(query, "steps", (text || "").replace(/[\s,]/g, ""), "");
      query.delete("last");
    });
  const put = (query, name, value, usual) =>
    value === usual || value === "" || value == null ? query.delete(name) : query.set(name, value);
  // what a field shows: Dash has it only a moment after the key, and Enter may come before
  const typed = (id) => document.getElementById(id).value;
  const clock = (wall) => {
    const at = new Date(wall * 1000);
    return new Date(at - at.getTimezoneOffset() * 60000).toISOString().slice(0, 19).replace("T", " ");
  };
  const address = (route, at) => {
    const [path, query] = split(route);
    put(query, "at", at == null ? null : at.toFixed(3), null);
    return joined(path, query);
  };

  const pageLinks = () => [...document.querySelectorAll("#pages [id^='nav-']")].map((link) => link.id);

  dash.zeromon = {
    // the server makes a new page when anything but the moment changes
    route: (path, search, known) => {
      const [, query] = split("?" + (search || "").replace(/^\?/, ""));
      const at = query.get("at");
      query.delete("at");
      const route = joined(path || "/", query);
      const moment = at ? Number(at) : null;
      const [oldPath, oldQuery] = split(known);
      oldQuery.delete("at");
      playing = null;
      if (known && joined(oldPath, oldQuery) === route) return [skip(), moment];
      shown = null;
      return [address(route, moment), moment];
    },

    poll: async (_, route, at, cursor) => {
      if (playing) at = advance();
      if (!route || !cursor || busy || held || document.hidden) return skip();
      const from = JSON.stringify(cursor) + route;
      const known = answered.from === from ? answered.next : cursor;
      busy = true;
      shown = route;
      try {
        const query = new URLSearchParams({ to: address(route, at), ...known });
        const answer = await fetch("/live?" + query, { cache: "no-store" });
        const body = await answer.json();
        if (shown !== route || held) return skip();
        dash.set_props("lost", { children: answer.ok ? "" : body.error || "" });
        if (!answer.ok) return skip();
        answered = { from, next: body.cursor };
        for (const [id, props] of Object.entries(body.props))
          if (document.getElementById(id)) dash.set_props(id, props);
        for (const [id, points] of Object.entries(body.extend))
          if (document.getElementById(id)) dash.set_props(id, { extendData: points });
        const health = document.getElementById("health");
        const run = decodeURIComponent(split(route)[0].split("/")[2] || "");
        if (health) document.title = `${health.textContent} · ${run} · zeromon`;
        return body.cursor;
      } catch (error) {
        dash.set_props("lost", { children: "zeromon dash does not answer; trying again" });
        return skip();
      } finally {
        busy = false;
      }
    },

    links: (route) => {
      const [path, query] = split(route);
      const parts = path.split("/").filter(Boolean);
      document.title = `${parts.length ? parts[1] || parts[0] : (query.get("compare") || "runs").replaceAll(",", " against ")} · zeromon`;
      const run = parts[0] === "run" ? parts[1] : null;
      const pages = pageLinks().map((id) => id.slice("nav-".length));
      for (const name of ["metric", "node", "changes", "lanes", "zoom"]) query.delete(name);
      const hrefs = pages.map((page) => (run ? joined(`/run/${run}/${page}`, query) : "/"));
      const page = run ? (pages.includes(parts[2]) ? parts[2] : "overview") : "runs";
      const link = document.getElementById(`nav-${page}`); // of a narrow screen: a strip that scrolls
      if (link) link.scrollIntoView({ block: "nearest", inline: "nearest" });
      return [...hrefs, ...["runs", ...pages].map((name) => name === page), run ? {} : { display: "none" }];
    },

    chosen: (last, ranks, others) =>
      searched((query) => {
        put(query, "last", last === "steps" ? "0" : last, "0");
        if (last !== "steps") query.delete("steps");
        put(query, "ranks", (ranks || []).join(","), "");
        put(query, "with", (others || []).join(","), "");
      }),

    stepped: (enters) => (enters ? ofSteps(typed("steps")) : skip()),

    // a range that is dragged in one chart becomes the address, and thereby that of every chart
    zoomed: (event) => {
      if (event && event["xaxis.autorange"]) return ofSteps("");
      const ends = event && (event["xaxis.range"] || [event["xaxis.range[0]"], event["xaxis.range[1]"]]);
      if (!ends || ends[0] == null || ends[1] == null) return skip();
      const first = Math.max(0, Math.ceil(ends[0])), last = Math.max(0, Math.floor(ends[1]));
      return ofSteps(first <= last ? `${first}-${last}` : `${last}-${first}`);
    },

    // what the timeline shows is in the address, without a new page
    laned: (steps) => {
      const query = new URLSearchParams(window.location.search);
      if (!steps || (query.get("lanes") || "3") === steps) return skip();
      put(query, "lanes", steps, "3");
      query.delete("zoom");
      window.history.replaceState(window.history.state, "", joined(window.location.pathname, query));
      return skip();
    },

    lanes: (event) => {
      const query = new URLSearchParams(window.location.search);
      const ends = event && (event["xaxis.range"] || [event["xaxis.range[0]"], event["xaxis.range[1]"]]);
      if (ends && ends[0] != null) put(query, "zoom", ends.map((ms) => Number(ms).toFixed(3)).join(":"), "");
      else if (event && event["xaxis.autorange"]) query.delete("zoom");
      else {
        const kept = (query.get("zoom") || "").split(":").map(Number);
        const drawn = document.querySelector("#lanes-chart .js-plotly-plot");
        if (drawn && kept.length === 2 && kept.every(Number.isFinite)) window.Plotly.relayout(drawn, { "xaxis.range": kept });
        return skip();
      }
      window.history.replaceState(window.history.state, "", joined(window.location.pathname, query));
      return skip();
    },

    measured: (metric) => (metric ? searched((query) => put(query, "metric", metric, "late")) : skip()),

    changed: (clicks, enters) =>
      clicks || enters ? searched((query) => put(query, "changes", typed("changes").trim(), "")) : skip(),

    drill: (event) => {
      const cell = event && event.points && event.points[0];
      const drawn = cell && document.querySelector("#rank-map .js-plotly-plot");
      // dcc.Graph does not pass on what a heat map's cell has besides its place
      const rank = drawn ? drawn.data[0].customdata[cell.y][cell.x][0] : event && event.rowId;
      if (rank === undefined || rank === null || rank === "") return [skip(), skip()];
      const run = window.location.pathname.split("/").filter(Boolean)[1];
      if (String(rank).startsWith("node/"))
        return [searched((query) => put(query, "node", rank.slice(5), "")), skip()];
      return [searched((query) => { put(query, "ranks", String(rank), ""); query.delete("metric"); query.delete("node"); }),
              `/run/${run}/overview`];
    },

    open: (event) =>
      // The browser follows the link itself; a click beside a box that selects opens nothing
      event && event.rowId && event.colId !== "link" && !event.colId.startsWith("ag-Grid")
        ? [`/run/${encodeURIComponent(event.rowId)}/overview`, ""] : [skip(), skip()],

    // sort and filters of the list are in the address, without a new page
    listed: async () => {
      const grid = await dash_ag_grid.getApiAsync("run-table");
      if (window.innerWidth < 768) { // of a phone: what is wrong with which run
        const shown = ["verdict", "link", "why"];
        const state = grid.getColumnState().filter(({ colId }) => !colId.startsWith("ag-Grid")).map(({ colId }) => (
          { colId, pinned: null, hide: !shown.includes(colId), ...(colId === "link" ? { width: 90 } : {}) }));
        grid.applyColumnState({ state });
      } else if (window.innerWidth < 1200) grid.setColumnsVisible(["pace", "memory", "steps", "ranks", "duration"], false);
      document.documentElement.dataset.listed = "yes";
      const query = new URLSearchParams(window.location.search);
      const [colId, sort] = (query.get("sort") || "").split(":");
      if (colId) grid.applyColumnState({ state: [{ colId, sort: sort || "asc" }], defaultState: { sort: null } });
      const model = {};
      for (const [name, filter] of query)
        if (name.startsWith("is-")) model[name.slice(3)] = { filterType: "text", type: "contains", filter };
      if (Object.keys(model).length) grid.setFilterModel(model);
      const keep = () => {
        const kept = new URLSearchParams(window.location.search);
        for (const name of [...kept.keys()]) if (name === "sort" || name.startsWith("is-")) kept.delete(name);
        for (const state of grid.getColumnState()) if (state.sort) kept.set("sort", `${state.colId}:${state.sort}`);
        for (const [name, { filter }] of Object.entries(grid.getFilterModel())) if (filter) kept.set(`is-${name}`, filter);
        window.history.replaceState(window.history.state, "", joined(window.location.pathname, kept));
      };
      grid.addEventListener("sortChanged", keep);
      grid.addEventListener("filterChanged", keep);
      return skip();
    },

    compare: (clicks, rows) =>
      clicks && rows && rows.length > 1
        ? searched((query) => put(query, "compare", rows.map((row) => row.run).join(","), "")) : skip(),

    lay: (clicks, rows) => {
      if (!clicks || !rows || rows.length < 2) return [skip(), skip()];
      const [first, ...others] = rows.map((row) => row.run);
      return [`/run/${encodeURIComponent(first)}/overview`, "?with=" + others.join(",")];
    },

    seek: (wall, end) => {
      if (wall == null) return [skip(), skip()];
      const now = wall >= end - 0.05;
      const query = new URLSearchParams(window.location.search);
      put(query, "at", now ? null : wall.toFixed(3), null);
      window.history.replaceState(window.history.state, "", joined(window.location.pathname, query));
      return [now ? null : wall, now ? "" : clock(wall)];
    },

    now: (clicks, end) => { playing = null; return clicks ? end : skip(); },

    play: (clicks, speed, begin, end, wall) => {
      const by = (dash.callback_context || {}).triggered || [];
      const pressed = by.some((one) => one.prop_id === "play.n_clicks") && clicks;
      if (!pressed) {
        if (playing) playing.speed = Number(speed);
        return skip();
      }
      playing = playing ? null : { speed: Number(speed), wall: wall >= end - 0.05 ? begin : wall, end, then: Date.now() };
      return playing ? "pause" : "play";
    },

    capture: async (clicks, route) => {
      if (!clicks) return skip();
      const run = decodeURIComponent(split(route)[0].split("/").filter(Boolean)[1] || "");
      const answer = await fetch("/act/trace", {
        method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify({ run, steps: 2 }),
      });
      if (answer.status === 401) return await answer.text();
      const body = await answer.json();
      return answer.ok ? `trace ${body.number} was requested` : `${body.error}. ${body.hint || ""}`;
    },

    dark: (dark) => {
      document.body.dataset.agThemeMode = dark ? "dark" : "light";
      if (dark != null) window.localStorage.setItem("zeromon-dark", dark ? "1" : "0");
      return dark ? "dark" : "light";
    },

    remembered: () => {
      const kept = window.localStorage.getItem("zeromon-dark");
      return kept == null ? window.matchMedia("(prefers-color-scheme: dark)").matches : kept === "1";
    },
  };

  function advance() {
    const now = Date.now();
    playing.wall = Math.min(playing.end, playing.wall + ((now - playing.then) / 1000) * playing.speed);
    playing.then = now;
    dash.set_props("when", { value: playing.wall });
    const at = playing.wall >= playing.end ? null : playing.wall;
    if (at == null) {
      playing = null;
      dash.set_props("play", { children: "play" });
    }
    return at;
  }

  for (const type of ["pointerdown", "pointermove", "pointerup", "pointercancel"])
    document.addEventListener(type, (event) => {
      held = event.buttons > 0 && (held || (type === "pointerdown" && !!event.target.closest(".js-plotly-plot, #life")));
    }, true);

  // 0: the list of runs; 1, 2, ...: the pages of a run, in their order
  const ofKey = (key) =>
    ({ d: "dark", " ": "play" })[key] || (/^[0-9]$/.test(key) ? ["nav-runs", ...pageLinks()][Number(key)] : undefined);
  document.addEventListener("keydown", (event) => {
    const cell = event.key === "Enter" && event.target.closest("#run-table .ag-cell, #rank-table .ag-cell");
    if (cell) return cell.click(); // as the mouse does
    const typing = event.target.closest("input:not([type=checkbox]), textarea, select, button, summary, [contenteditable]");
    if (typing || event.ctrlKey || event.metaKey || event.altKey || !ofKey(event.key)) return;
    const found = document.getElementById(ofKey(event.key));
    if (found && found.offsetParent !== null) {
      event.preventDefault();
      found.click();
    }
  });
})();
