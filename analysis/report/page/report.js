// The report: draws the data that it holds, and saves it.
"use strict";

document.documentElement.classList.add("scripted");
const shardwright = showStep(JSON.parse(document.getElementById("data").textContent), new AbortController().signal);
showFigures(shardwright.data);
performance.mark("shardwright-drawn");

(() => {
  const {data} = shardwright;
  const byId = (id) => document.getElementById(id);
  const save = (name, text) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], {type: "application/json"}));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  byId("save-data").addEventListener("click", () => save("report.json", byId("data").textContent));
  byId("save-plan").addEventListener("click", () => save("plan.json", JSON.stringify(data.plan, null, 2) + "\n"));
  // The plan is behind #, which no server sees.
  const page = data.page === undefined ? null : new URL(data.page, location.href);
  if (page !== null && ["https:", "http:", "file:"].includes(page.protocol)) {
    page.hash = new URLSearchParams({"page-plan-file": JSON.stringify(data.plan)});
    byId("to-page").href = page.href;
    byId("to-page").hidden = false;
  }
})();
