// The page: asks the engine when the question changes, and shows what it says.
"use strict";

(async () => {
  const byId = (id) => document.getElementById(id);
  const root = document.documentElement;
  root.classList.add("scripted");
  const say = (text) => { byId("status").textContent = text; };
  const complain = (text) => {
    byId("trouble").textContent = text;
    byId("trouble").hidden = text === "";
  };

  try {
    await engine.load();
  } catch (error) {
    say("");
    complain(error.message);
    return;
  }
  // A command whose output is JSON. Its errors are what the program says on standard error.
  const ask = async (words, more = {}, progress) => {
    const result = await engine.run({words: [...words, "--json"], ...more}, progress);
    if (result.code > 1 || result.output === "") {
      throw new Error(result.errors.trim() || `The engine ended with code ${result.code}.`);
    }
    return {json: JSON.parse(result.output), errors: result.errors.trim(), text: result.output};
  };

  const help = (await ask(["plan", "--help"])).json;
  byId("version").textContent = help.version;
  const question = makeQuestion(help.commands[0], (await ask(["estimate", "--help"])).json.commands[0]);
  const addOptions = (list, rows, textOf) => byId(list).append(...rows.map((row) => {
    const option = document.createElement("option");
    option.value = row.name;
    option.label = textOf(row);
    return option;
  }));
  addOptions("models", (await ask(["list", "models"])).json.models, (row) => row.type ?? "");
  addOptions("clusters", (await ask(["list", "clusters"])).json.clusters, (row) => row.description);
  const targets = (await ask(["emit", "--help"])).json.commands[0].flags.find((flag) => flag.name === "--to").help
    .replace(/\(.*$/, "").split(/, | or /).map((name) => name.trim());
  addOptions("target", targets.map((name) => ({name})), (row) => row.name);

  // The elements that pictures of one step are drawn into, as they are before anything is drawn.
  const blank = byId("pictures").cloneNode(true);
  let drawing = null;
  const draw = (report) => {
    drawing?.abort();
    drawing = new AbortController();
    byId("pictures").replaceChildren(...blank.cloneNode(true).childNodes);
    byId("pictures").hidden = false;
    window.shardwrightStep = showStep(report, drawing.signal);
  };

  // What is shown: the plan file as text, and the answers about it.
  const shown = {plan: null, search: null, simulation: null, report: null, kept: null};
  const found = {key: "", words: [], json: null, errors: ""};  // by the last command
  let round = 0, timer = 0;

  const showFront = (search) => {
    const rows = search?.pareto ?? [];
    const best = rows.findIndex((row) => row.family === search.family && row.label === search.label);
    const opened = question.state.point ?? best;
    byId("front").hidden = rows.length === 0;
    byId("pareto").replaceChildren();
    if (rows.length > 0) {
      const points = rows.map((row, i) => ({...row, index: i, label: `${row.family}: ${row.label}`, chosen: i === opened}));
      drawPareto(byId("pareto"), points, (point) => {
        question.state.point = point.index === best ? null : point.index;
        start();
      });
    }
  };
  const showCosts = (search) => {
    // Of another point of the front nothing was tried.
    byId("costs").hidden = question.state.point !== null || (search?.explanation?.alternatives ?? []).length === 0;
    if (!byId("costs").hidden) {
      drawCosts(byId("costs-body"), search);
    }
  };
  const showSide = async () => {
    if (shown.kept !== null && shown.plan !== null) {
      const files = [{name: "kept.json", content: shown.kept}, {name: "this.json", content: shown.plan}];
      answer.showSide((await ask(["diff", "@kept.json", "@this.json"], {files})).json);
    }
  };
  const showSettings = async () => {
    const mine = round;
    byId("emitted").replaceChildren();
    try {
      const {json} = await ask(["emit", "-", `--to=${byId("target").value}`], {input: shown.plan});
      if (mine === round) {
        answer.showEmission(json);
      }
    } catch (error) {
      if (error.message !== "cancelled") {
        const text = document.createElement("p");
        text.textContent = error.message;
        byId("emitted").replaceChildren(text);
      }
    }
  };

  // What somebody measured, against the plan that is shown.
  const showMeasured = async (file, mine) => {
    const files = [file];
    if (isPickle(file.content)) {
      const {json} = await ask(["inspect-trace", `@${file.name}`], {files});
      if (mine === round) {
        answer.showSnapshot(file.name, json, shown.simulation);
        draw(shown.report);  // without the step of a trace that was dropped before
      }
      return "";
    }
    const {json, errors} = await ask(["report", "-", `@${file.name}`], {input: shown.plan, files});
    if (json.comparison === undefined) {
      throw new Error(`${file.name}: got a simulated trace, expected one that was measured.`);
    }
    if (mine === round) {
      answer.showComparison(file.name, json);
      draw(json);
    }
    return errors;
  };

  // Everything about a plan file.
  const showPlan = async (plan, search, mine) => {
    const report = (await ask(["report", "-"], {input: plan})).json;
    if (mine !== round) {
      return;
    }
    const simulation = report.prediction;
    Object.assign(shown, {plan, search, simulation, report});
    byId("result").hidden = false;
    byId("measured").hidden = true;
    for (const id of ["take", "side", "pictures", "published"]) {
      byId(id).hidden = false;
    }
    answer.show(search, simulation, report);
    showFront(search);
    showCosts(search);
    drawPublished(byId("published-body"), simulation.profile);
    draw(report);
    byId("command").textContent = question.state.plan !== null ? `shardwright simulate ${question.state.plan.name}` :
      question.state.point !== null ? "shardwright simulate plan.json" : question.commandLine(found.words);
    byId("emitted").replaceChildren();  // were another plan's
  };
  // What nobody reads while a slider is dragged waits until the question rests.
  let rest = 0;
  const showRestLater = (mine) => {
    rest = setTimeout(async () => {
      try {
        await showSettings();
        await showSide();
      } catch (error) {
        if (mine === round) {
          complain(error.message === "cancelled" ? "" : error.message);
        }
      }
    }, 200);
  };
  const showNothingFits = (search, show) => {
    Object.assign(shown, {plan: null, search, simulation: null, report: null});
    byId("result").hidden = false;
    for (const id of ["take", "side", "pictures", "published", "measured"]) {
      byId(id).hidden = true;
    }
    show(search);
    showFront(null);
    showCosts(null);
  };

  const work = async (mine) => {
    const dropped = question.state.plan;
    if (dropped !== null) {
      await showPlan(dropped.content, null, mine);
      return "";
    }
    const progress = ({simulated, best, bound}) => {
      if (mine === round) {
        say(`Searching: ${answer.count(simulated)} plans simulated, fastest tried ${best > 0 ? answer.seconds(best) : "none fits"}, ` +
          `none can be below ${answer.seconds(bound)}.`);
      }
    };
    const files = question.files();
    // Another point of the same search needs no new one.
    const key = JSON.stringify([question.words(), files]);
    if (found.key !== key) {
      let words = question.words(), made = null;
      if (question.wantsLargestBatch()) {
        made = await ask(question.estimateWords(), {files});
        words = made.json.fits ? question.wordsAfter(made.json.next) : words;
      }
      if (made === null || made.json.fits) {
        made = mine === round ? await ask(words, {files}, progress) : null;
      }
      if (mine !== round) {
        return "";
      }
      Object.assign(found, made, {key, words});
    }
    const {json, errors} = found;
    if (json.schema === "shardwright-estimate") {
      showNothingFits(json, answer.showEstimatedMisfit);
    } else if (json.feasible === false) {
      showNothingFits(json, answer.showMisfit);
    } else {
      const point = json.pareto?.[question.state.point ?? -1];
      const plan = point === undefined ? json.plan_file : {...json.plan_file, plan: point.plan};
      await showPlan(`${JSON.stringify(plan)}\n`, json.feasible ? json : null, mine);
    }
    return errors;
  };
  // A slider is followed: its last place is asked for when the place before it has been answered.
  let isWorking = false, isBehind = false;
  const follow = () => {
    clearTimeout(timer);
    if (isWorking) {
      engine.cancelSearch();
      isBehind = true;
    } else {
      start();
    }
  };
  const start = async () => {
    engine.cancelSearch();
    clearTimeout(rest);
    isWorking = true;
    const mine = ++round;
    const begin = performance.now();
    byId("cancel").disabled = false;
    byId("result").classList.add("old");
    complain("");
    say("Working.");
    try {
      const warnings = await work(mine);
      if (mine === round) {
        say(`Done in ${answer.seconds((performance.now() - begin) / 1000)}.`);
        complain(warnings ?? "");
        byId("result").classList.remove("old");
        if (question.state.plan === null) {
          history.replaceState(null, "", question.link());
        }
        performance.mark("shardwright-answered");
        if (shown.plan !== null) {
          showRestLater(mine);
        }
      }
    } catch (error) {
      if (mine === round) {
        say(error.message === "cancelled" ? `Cancelled. ${byId("status").textContent}` : "No answer.");
        complain(error.message === "cancelled" ? "" : error.message);
      }
    }
    if (mine !== round) {
      return;
    }
    byId("cancel").disabled = true;
    isWorking = false;
    if (isBehind) {
      isBehind = false;
      await start();
    }
  };

  const reflect = () => {
    root.classList.toggle("is-search", byId("search-plan").checked);
    root.classList.toggle("is-choose", !byId("search-plan").checked);
    root.classList.toggle("is-full", byId("full").checked);
    const nodes = Number(byId("nodes").value);
    if (nodes >= 1) {
      byId("nodes-slider").value = Math.round(Math.log2(nodes));
    }
  };
  const later = (delay) => {
    clearTimeout(timer);
    timer = setTimeout(start, delay);
  };
  // `inspect` knows models and plans; a cluster says itself what it is.
  const isCluster = ({content}) => {
    try {
      return JSON.parse(content)?.format === "shardwright-cluster";
    } catch {
      return false;
    }
  };
  const isPickle = (content) => content[0] === 0x80;
  const isMeasured = ({content}) => isPickle(content) || /^\s*\{/.test(content) && content.includes('"traceEvents"');
  const takeMeasured = async (file, mine) => {
    if (shown.plan === null) {
      throw new Error("No plan is shown that it could be compared with: ask for the job that it is a run of, or drop its plan, then drop it again.");
    }
    const warnings = await showMeasured(file, mine);
    if (mine === round) {
      complain(warnings);
      byId("measured").hidden = false;
      byId("measured").scrollIntoView();
      performance.mark("shardwright-answered");
    }
  };
  // Makes the file part of the question.
  const takePart = async (file, mine) => {
    const kind = isCluster(file) ? "cluster" : (await ask(["inspect", `@${file.name}`], {files: [file]})).json.kind;
    if (mine !== round) {
      return;
    }
    question.state.point = null;
    if (kind === "plan") {
      question.state.plan = file;
      question.state.model = null;
      byId("model").value = "";
    } else {
      const place = kind === "cluster" ? kind : "model";
      question.state.plan = null;
      question.state[place] = file;
      byId(place).value = file.name;
      byId("nodes").value = place === "cluster" ? "" : byId("nodes").value;  // it says how many
    }
    await start();
  };
  const takeFile = async (name, bytes) => {
    clearTimeout(timer);
    engine.cancelSearch();
    const mine = ++round;  // no earlier question is answered any more
    isWorking = isBehind = false;
    const begin = performance.now();
    let failure = "This file cannot be read.";
    try {
      const unpacked = bytes[0] === 0x1f && bytes[1] === 0x8b ? new Uint8Array(await engine.unpack(bytes)) : bytes;
      const file = {name: name.replace(/\.gz$/, "") || "file.json",
        content: isPickle(unpacked) ? unpacked : new TextDecoder().decode(unpacked)};
      if (!isMeasured(file)) {
        failure = "This file is none that a plan can be made of.";
        await takePart(file, mine);
        return;
      }
      failure = "This file cannot be compared.";
      byId("cancel").disabled = false;
      say(`Reading ${file.name}.`);
      await takeMeasured(file, mine);
      if (mine === round) {
        say(`Done in ${answer.seconds((performance.now() - begin) / 1000)}.`);
      }
    } catch (error) {
      if (mine === round) {
        say(error.message === "cancelled" ? "Cancelled." : failure);
        complain(error.message === "cancelled" ? "" : error.message);
      }
    }
    if (mine === round) {
      byId("cancel").disabled = true;
    }
  };

  byId("question").addEventListener("input", (event) => {
    if (event.target.id === "nodes-slider") {
      byId("nodes").value = 2 ** Number(event.target.value);
    } else if (event.target.id === "model") {
      question.state.plan = null;
    }
    question.state.point = null;
    reflect();
    if (event.target.type !== "file" && event.target.id !== "paste" && byId("question").checkValidity()) {
      if (event.target.type === "range" || event.target.type === "radio") {
        follow();
      } else {
        later(400);
      }
    }
  });
  byId("question").addEventListener("submit", (event) => {
    event.preventDefault();
    clearTimeout(timer);
    start();
  });
  byId("cancel").addEventListener("click", () => {
    clearTimeout(timer);
    engine.cancel();
  });
  byId("file").addEventListener("change", async () => {
    const [file] = byId("file").files;
    if (file !== undefined) {
      const bytes = new Uint8Array(await file.arrayBuffer());
      byId("file").value = "";  // the same file may be given again, changed
      await takeFile(file.name, bytes);
    }
  });
  byId("use-paste").addEventListener("click", () => takeFile("pasted.json", new TextEncoder().encode(byId("paste").value)));
  for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
    window.addEventListener(kind, (event) => {
      event.preventDefault();
      byId("drop").classList.toggle("over", kind === "dragenter" || kind === "dragover");
    });
  }
  window.addEventListener("drop", async (event) => {
    const [file] = event.dataTransfer.files;
    if (file !== undefined) {
      await takeFile(file.name, new Uint8Array(await file.arrayBuffer()));
    }
  });

  const save = (name, text, type) => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([text], {type}));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10000);
  };
  const copy = (button, text) => navigator.clipboard.writeText(text).then(() => say("Copied."), () => {
    say("The browser does not let this page copy; the text is selected instead.");
    getSelection().selectAllChildren(byId("command"));
  });
  byId("target").addEventListener("change", showSettings);
  byId("save-plan").addEventListener("click", () => save("plan.json", `${JSON.stringify(JSON.parse(shown.plan), null, 2)}\n`, "application/json"));
  byId("save-report").addEventListener("click", async () => {
    // It links back to here, and shows what the search considered.
    const files = shown.search === null ? [] : [{name: "search.json", content: JSON.stringify(shown.search)}];
    const result = await engine.run({words: ["report", "-", "--output=-", `--page=${location.href.replace(/#.*$/s, "")}`,
      ...(files.length > 0 ? ["--search", "@search.json"] : [])], input: shown.plan, files});
    save("report.html", result.output, "text/html");
  });
  byId("copy-command").addEventListener("click", (event) => copy(event.target, byId("command").textContent));
  byId("copy-link").addEventListener("click", async (event) => {
    await copy(event.target, new URL(question.link(), location.href).href);
    if (question.isTooLong()) {
      say("The model file is too large for a link: whoever opens it must give the file again.");
    }
  });
  byId("keep").addEventListener("click", () => {
    shown.kept = shown.plan;
    showSide();
  });
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault();  // what is behind # is the question
    byId("answer").focus();
  });
  window.addEventListener("hashchange", () => {
    if (question.read(location.hash)) {
      reflect();
      start();
    }
  });

  question.read(location.hash);
  reflect();
  performance.mark("shardwright-usable");
  await start();
})();
