"use strict";
// Draws a chart when it comes near the window, and hides what the reader does not want to see.

const config = JSON.parse(document.getElementById("config").textContent);
const figures = [...document.querySelectorAll("figure[data-chart]")];
const hidden = { backend: new Set(), operation: new Set() };
document.documentElement.classList.add("js");

function specOf(figure) {
  return figure.spec ??= JSON.parse(figure.querySelector("script").textContent);
}

function shownBackends(figure) {
  const parameter = specOf(figure).params?.find(({ name }) => name === "backends");
  return parameter?.value.filter((backend) => !hidden.backend.has(backend));
}

async function draw(figure) {
  const spec = specOf(figure);
  const drawn = {
    ...spec,
    width: "container",
    params: spec.params?.map((p) => (p.name === "backends" ? { ...p, value: shownBackends(figure) } : p)),
  };
  // Errors alone are logged: a layer without data is nothing to warn of.
  const options = { actions: false, renderer: "svg", ast: true, config, logLevel: 1 };
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

addEventListener("beforeprint", () => figures.filter((one) => !one.view && !one.hidden).forEach(draw));

// --- backends and operations -------------------------------------------------------------------

document.querySelector("form.controls").addEventListener("change", ({ target }) => {
  hidden[target.name][target.checked ? "delete" : "add"](target.value);
  if (target.name === "operation") {
    for (const figure of document.querySelectorAll("figure[data-operation]")) {
      figure.hidden = hidden.operation.has(figure.dataset.operation);
    }
    return;
  }
  for (const row of document.querySelectorAll("tr[data-backend]")) {
    row.hidden = hidden.backend.has(row.dataset.backend);
  }
  for (const figure of figures.filter((one) => one.view && shownBackends(one))) {
    figure.view.signal("backends", shownBackends(figure)).run();
  }
});

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
