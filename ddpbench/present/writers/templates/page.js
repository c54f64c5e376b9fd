"use strict";
// Draws a chart when it comes near the window, and hides what the reader does not want to see.

const configs = JSON.parse(document.getElementById("configs").textContent);
const figures = [...document.querySelectorAll("figure[data-chart]")];
const dark = matchMedia("(prefers-color-scheme: dark)");
const hidden = { backend: new Set(), operation: new Set() };
let printing = false;
document.documentElement.classList.add("js");

// {size: [1, 2], time: [3, 4]} → [{size: 1, time: 3}, {size: 2, time: 4}]
function toRows(columns) {
  const names = Object.keys(columns);
  return names.length === 0 ? [] : columns[names[0]].map(
    (_, i) => Object.fromEntries(names.map((name) => [name, columns[name][i]])));
}

function contentOf(figure) {
  return figure.content ??= JSON.parse(figure.querySelector("script").textContent);
}

function shownBackends(figure) {
  const parameter = contentOf(figure).spec.params?.find(({ name }) => name === "backends");
  return parameter?.value.filter((backend) => !hidden.backend.has(backend));
}

async function draw(figure) {
  const { spec, datasets, choices } = contentOf(figure);
  const data = choices.length ? choices[figure.chosen ?? 0].data : datasets;
  const theme = dark.matches && !printing ? "dark" : "light";
  const drawn = {
    ...spec,
    width: "container",
    datasets: Object.fromEntries(Object.entries(data).map(([name, columns]) => [name, toRows(columns)])),
    params: spec.params?.map((p) => (p.name === "backends" ? { ...p, value: shownBackends(figure) } : p)),
  };
  figure.view?.finalize();
  const options = {
    actions: false, renderer: "svg", ast: true, config: configs[theme], tooltip: { theme },
    logLevel: 1, // errors: a layer without data is nothing to warn of
  };
  figure.view = (await vegaEmbed(figure.querySelector(".chart"), drawn, options)).view;
  figure.querySelector(".chart svg").setAttribute("aria-hidden", "true"); // the box around it has a name
}

const observer = new IntersectionObserver((entries) => {
  for (const { isIntersecting, target } of entries) {
    if (isIntersecting) {
      observer.unobserve(target);
      draw(target);
    }
  }
}, { rootMargin: "500px" });
figures.forEach((figure) => observer.observe(figure));

function redraw() {
  figures.filter((figure) => figure.view).forEach(draw);
}

dark.addEventListener("change", redraw);
addEventListener("beforeprint", () => {
  printing = true;
  figures.filter((figure) => !figure.hidden).forEach(draw);
});
addEventListener("afterprint", () => {
  printing = false;
  redraw();
});

// --- backends and operations -------------------------------------------------------------------

function hideRows(table) {
  for (const row of table.querySelectorAll("tr[data-backend]")) {
    row.hidden = hidden.backend.has(row.dataset.backend);
  }
}

document.querySelector("form.controls").addEventListener("change", ({ target }) => {
  hidden[target.name][target.checked ? "delete" : "add"](target.value);
  if (target.name === "operation") {
    for (const figure of document.querySelectorAll("figure[data-operation]")) {
      figure.hidden = hidden.operation.has(figure.dataset.operation);
    }
    return;
  }
  hideRows(document);
  for (const figure of figures.filter((one) => one.view && shownBackends(one))) {
    figure.view.signal("backends", shownBackends(figure)).run();
  }
});

// --- charts that show one of several cases -------------------------------------------------------

function cell(tag, text, classes) {
  const element = document.createElement(tag);
  element.textContent = text;
  element.className = classes + (tag === "td" && text.length > 36 ? " long" : "");
  return element;
}

function showTable(figure, { columns, rows, backend }) {
  const table = figure.querySelector("table");
  const body = rows.map((cells) => {
    const row = document.createElement("tr");
    if (backend !== null) row.dataset.backend = cells[backend].replace(" *", "");
    row.append(...cells.map((text, i) => cell("td", text, columns[i][1])));
    return row;
  });
  table.tHead?.rows[0].replaceChildren(...columns.map(([heading, align]) => cell("th", heading, align)));
  table.tBodies[0].replaceChildren(...body);
  hideRows(table);
}

// Charts of one section that show the same cases show the same one.
function choose(label, section) {
  for (const figure of figures.filter((one) => one.closest("section") === section)) {
    const { choices } = contentOf(figure);
    const chosen = choices.findIndex((choice) => choice.label === label);
    if (chosen < 0) continue;
    figure.chosen = chosen;
    figure.querySelector("select").value = label;
    showTable(figure, choices[chosen].table);
    if (figure.view) draw(figure);
  }
}

for (const figure of figures.filter((one) => one.querySelector("select[name=choice]"))) {
  const select = figure.querySelector("select");
  const labels = [...select.options].map((option) => option.label);
  const section = figure.closest("section");
  select.addEventListener("change", () => choose(select.value, section));
  figure.querySelector("input[name=filter]")?.addEventListener("input", ({ target }) => {
    const words = target.value.toLowerCase().split(/\s+/);
    const matching = labels.filter((label) => words.every((word) => label.toLowerCase().includes(word)));
    const before = select.value;
    select.replaceChildren(...matching.map((label) => new Option(label, label, false, label === before)));
    if (select.value !== before && select.value) choose(select.value, section);
  });
}

// --- commands --------------------------------------------------------------------------------------

for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.previousElementSibling;
    try {
      await navigator.clipboard.writeText(code.textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    } catch {
      getSelection().selectAllChildren(code); // the reader can press Ctrl+C
    }
  });
}
