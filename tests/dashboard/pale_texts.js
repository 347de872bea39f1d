// [how many texts of figures were read, those with less than 4.5 to 1 against what lies behind]
async ([picture, where]) => {
  const bytes = Uint8Array.from(atob(picture), (c) => c.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes]));
  const pen = new OffscreenCanvas(image.width, image.height).getContext('2d', { willReadFrequently: true });
  pen.drawImage(image, 0, 0);
  const numbers = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
  const linear = (v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const ratio = (a, b) => (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  const pale = [];
  let read = 0;
  for (const text of document.querySelectorAll(`.js-plotly-plot ${where}`)) {
    const box = text.getBoundingClientRect(), style = getComputedStyle(text);
    if (!text.textContent.trim() || box.width < 1 || box.left < 0 || box.top < 0) continue;
    if (box.right > image.width || box.bottom > image.height) continue;
    if (text.closest('details:not([open])')) continue; // it has a place, and is not shown
    let alpha = Number(style.fillOpacity) * (numbers(style.fill)[3] ?? 1);
    for (let node = text; node.getAttribute; node = node.parentNode) alpha *= Number(getComputedStyle(node).opacity);
    if (alpha < 0.05) continue; // plotly measures with such texts
    read += 1;
    const pixels = pen.getImageData(box.left, box.top, Math.ceil(box.width), Math.ceil(box.height)).data;
    const counts = new Map();
    for (let n = 0; n < pixels.length; n += 4) {
      const colour = [pixels[n], pixels[n + 1], pixels[n + 2]].join();
      counts.set(colour, (counts.get(colour) || 0) + 4);
    }
    for (const [colour, count] of counts) {
      if (count < 0.25 * pixels.length) continue; // a line that crosses the text
      const behind = numbers(colour);
      const shown = numbers(style.fill).slice(0, 3).map((v, n) => alpha * v + (1 - alpha) * behind[n]);
      const contrast = ratio(luminance(shown), luminance(behind));
      if (contrast < 4.5) pale.push(`${text.textContent}: ${contrast.toFixed(1)}, ${shown} on ${colour}`);
    }
  }
  return [read, pale];
}
