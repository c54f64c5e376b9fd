const configs = JSON.parse(document.getElementById("configs").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const spec = JSON.parse(figure.querySelector("script").textContent);
  if (spec === null) continue;
  vegaEmbed(figure.querySelector(".chart"), { ...spec, width: "container" }, {
    actions: false, renderer: "svg", config: configs[dark.matches ? "dark" : "light"],
  });
}
