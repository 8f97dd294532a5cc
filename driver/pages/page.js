"use strict";
(() => {
  const read = (id) => JSON.parse(document.getElementById(id).textContent);
  const data = read("data");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // Bokeh draws on canvases, which no style sheet reaches.
  const INK = ["axis_label_text_color", "title_text_color"];
  const FAINT = ["major_label_text_color", "axis_line_color", "major_tick_line_color", "minor_tick_line_color"];
  function paint() {
    const ink = style("--ink"), faint = style("--faint"), line = style("--line");
    for (const doc of Bokeh.documents) for (const model of doc._all_models.values()) {
      const colours = {};
      for (const name of INK) if (name in model.properties) colours[name] = ink;
      for (const name of FAINT) if (name in model.properties) colours[name] = faint;
      if ("grid_line_color" in model.properties && model.visible) colours.grid_line_color = line;
      if (model.name === "ink") model.glyph.line_color = ink;
      if (model.name === "note") model.glyph.text_color = faint;
      model.setv(colours);
    }
  }

  // A finger that moves over a figure moves the page.
  function release() {
    if (!matchMedia("(pointer: coarse)").matches) return;
    for (const doc of Bokeh.documents) for (const model of doc._all_models.values())
      if (["PanTool", "BoxZoomTool"].includes(model.type)) model.active = false;
  }

  function follow(chooser) {
    const text = document.getElementById("loops");
    const buttons = [...document.querySelectorAll(".layers button")];
    for (const button of buttons) button.addEventListener("click", () => {
      chooser.value = chooser.value === button.dataset.layer ? "" : button.dataset.layer;
      chooser.dispatchEvent(new Event("change"));
    });
    chooser.addEventListener("change", () => {
      const layer = data.layers?.[chooser.value];
      for (const button of buttons) button.ariaPressed = button.dataset.layer === chooser.value;
      text.textContent = layer?.text ?? "";
      const time = Bokeh.documents.map((doc) => doc.get_model_by_name("time")).find(Boolean);
      if (!time) return;
      const [first, last] = layer?.span ?? [0, data.cycles];
      const margin = layer ? Math.ceil((last - first) * 0.03) + 5 : 0;
      time.setv({start: Math.max(0, first - margin), end: Math.min(data.cycles, last + margin)});
    });
  }

  async function draw() {
    for (const item of read("figures")) await Bokeh.embed.embed_item(item);
    if (window.Bokeh) { paint(); release(); dark.addEventListener("change", paint); }
    const chooser = document.getElementById("layer");
    if (chooser) follow(chooser);
    document.body.dataset.milliseconds = Math.round(performance.now());
    document.body.dataset.ready = "yes";
  }
  draw().catch((error) => { console.error(error); document.body.dataset.ready = "failed"; });
})();
