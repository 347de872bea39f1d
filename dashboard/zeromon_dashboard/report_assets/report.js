// Draws the figures of a report when they come into view. A picture has plotly as it is, a page packed.
const still = !document.getElementById("plotly");
const seen = new IntersectionObserver((entries) => entries.forEach(({ isIntersecting, target }) => {
  if (!isIntersecting) return;
  seen.unobserve(target);
  const { data, layout } = figures[target.id];
  Plotly.newPlot(target, data, layout, { displayModeBar: false, responsive: true });
}), { rootMargin: still ? "99999px" : "200px" });
const drawAll = () => document.querySelectorAll(".Graph").forEach((graph) => seen.observe(graph));
if (still) {
  document.querySelectorAll("details").forEach((part) => { part.open = true; });
  drawAll();
} else {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const code = new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
  code.then((text) => {
    const script = document.createElement("script");
    script.textContent = text;
    document.head.append(script);
    drawAll();
  });
}
