// The question: what the form says, as words of a command line and as a link.
"use strict";

// `plan` and `estimate` are the commands' tables, as `--help --json` prints them.
const makeQuestion = (plan, estimate) => {
  const byId = (id) => document.getElementById(id);
  // Flags that have a place of their own in the form, by the id of their element.
  const PLACES = {
    "--model": "model", "--cluster": "cluster", "--nodes": "nodes", "--gpus": "gpus", "--seq": "seq", "--global-batch": "global-batch",
    "--precision": "precision", "--dialect": "dialect", "--lora-rank": "lora-rank", "--micro-batch": "micro-batch",
    "--recompute": "recompute", "--reshard": "reshard", "--wrap": "wrap", "--shard": "shard", "--replicate": "replicate",
    "--offload": "offload", "--mem": "mem",
  };
  const ABSENT = new Set(["--output", "--keep", "--threads", "--budget", "--token-budget", "--objective", "--from"]);
  const CHOICES = new Set(["--micro-batch", "--recompute", "--reshard", "--wrap", "--shard", "--replicate", "--offload"]);
  const elements = new Map();

  const option = (value, text) => {
    const element = document.createElement("option");
    element.value = value;
    element.textContent = text;
    return element;
  };
  // "a|b|c" is a choice; names in a help text that begins with a list are suggestions.
  const namesIn = (flag) => flag.value.includes("|") && !/[A-Z]/.test(flag.value) ? flag.value.split("|") : [];
  const suggestionsIn = (flag) => flag.help.split(/[(;]/)[0].split(/, | or |: | some of /).map((word) => word.trim())
    .filter((word) => /^[a-z0-9_-]+$/.test(word) && word !== "or").concat(flag.value.split("|").filter((word) => /^[a-z_]+$/.test(word)));

  const describe = (element, flag) => {
    const hint = document.createElement("span");
    hint.className = "hint";
    hint.id = `${element.id}-help`;
    hint.textContent = flag.help;
    element.setAttribute("aria-describedby", hint.id);
    element.after(hint);
  };
  const fill = (element, flag) => {
    if (element.tagName === "SELECT") {
      element.append(option("", "default"), ...namesIn(flag).map((name) => option(name, name)));
    } else if (element.hasAttribute("list") && byId(element.getAttribute("list")).children.length === 0) {
      byId(element.getAttribute("list")).append(...[...new Set(suggestionsIn(flag))].map((name) => option(name, name)));
    }
    if (element.placeholder === "" && flag.value !== "") {
      element.placeholder = flag.value;
    }
    describe(element, flag);
  };
  const addOther = (flag) => {
    const label = document.createElement("label");
    const names = namesIn(flag);
    const element = document.createElement(names.length > 0 ? "select" : "input");
    element.id = `flag${flag.name}`;
    label.append(flag.name.slice(2).replaceAll("-", " "), element);
    byId("other-flags").append(label);
    elements.set(flag.name, element);
    fill(element, flag);
  };

  for (const flag of plan.flags) {
    if (PLACES[flag.name] !== undefined) {
      elements.set(flag.name, byId(PLACES[flag.name]));
      fill(byId(PLACES[flag.name]), flag);
    } else if (!ABSENT.has(flag.name)) {
      addOther(flag);
    }
  }

  // Files that stand for names: {name, content} or null. The point of the front that is opened instead of the best.
  const state = {model: null, cluster: null, plan: null, point: null};
  const isSearch = () => byId("search-plan").checked;
  const isShown = (name) => name === "--lora-rank" ? byId("lora").checked : !CHOICES.has(name) || !isSearch();

  // [[flag, value]] of all that is said.
  const given = () => {
    const pairs = [];
    for (const [name, element] of elements) {
      const value = element.value.trim();
      if (value !== "" && isShown(name) && !(name === "--mem" && !isSearch())) {
        pairs.push([name, value]);
      }
    }
    return pairs;
  };
  // The file that a flag's value names, or undefined.
  const fileOf = (name, value) => {
    const file = {"--model": state.model, "--cluster": state.cluster}[name] ?? null;
    return file !== null && file.name === value ? file : undefined;
  };
  const pairWords = ([name, value]) => fileOf(name, value) === undefined ? [`${name}=${value}`] : [name, `@${value}`];
  const words = () => ["plan", ...(isSearch() ? ["--search", "--explain"] : ["--no-search"]), ...given().flatMap(pairWords)];
  const files = () => given().map(([name, value]) => fileOf(name, value)).filter((file) => file !== undefined);

  // Without a global batch `estimate` tries micro-batches, and says which command searches on.
  const wantsLargestBatch = () => isSearch() && byId("global-batch").value.trim() === "";
  const estimateWords = () => {
    const known = new Set(estimate.flags.flatMap((flag) => flag.name.split(",")));
    const positional = [], flags = [];
    for (const [name, value] of given()) {
      if (name === "--model" || name === "--cluster") {
        positional.push(fileOf(name, value) === undefined ? value : `@${value}`);
      } else if (known.has(name)) {
        flags.push(`${name}=${value}`);
      } else {
        throw new Error(`The largest batch is looked for without ${name}: say a global batch, too.`);
      }
    }
    return ["estimate", ...positional, ...flags];
  };
  // The words of `next`, a command line of `estimate`, without the file that it would write.
  const wordsAfter = (next) => {
    const list = [...next.matchAll(/'((?:[^']|'\\'')*)'(?=\s|$)|\S+/g)].map(([word, inside]) => inside === undefined ? word :
      inside.replaceAll("'\\''", "'"));
    const [, command, ...rest] = list.slice(0, list.indexOf("-o"));
    for (const name of ["--model", "--cluster"]) {
      const value = byId(name.slice(2)).value.trim();
      if (fileOf(name, value) !== undefined) {
        rest[rest.indexOf(name) + 1] = `@${value}`;
      }
    }
    return [command, "--search", "--explain", ...rest];
  };

  const quoted = (word) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`;
  const commandLine = (of) => ["shardwright", ...of.map((word) => word.startsWith("@") ? word.slice(1) : word)].map(quoted).join(" ");

  // Browsers refuse addresses of some megabytes, and people those of more than a few lines.
  const isTooLong = () => files().some((file) => file.content.length > 100000);
  const EXTRA = ["tokens", "price"];  // not of the command line
  const FILES = ["model", "cluster"];
  const link = () => {
    const parameters = new URLSearchParams();
    parameters.set("how", isSearch() ? "search" : "choose");
    for (const [name, value] of given()) {
      parameters.set(name.slice(2), value);
    }
    for (const name of EXTRA) {
      if (byId(name).value.trim() !== "") {
        parameters.set(`page-${name}`, byId(name).value.trim());
      }
    }
    for (const kind of FILES) {
      if (files().includes(state[kind]) && !isTooLong()) {
        parameters.set(`page-${kind}-file`, state[kind].content);
      }
    }
    if (state.point !== null) {
      parameters.set("page-point", state.point);
    }
    return `#${parameters}`;
  };
  // Returns whether the link says anything.
  const read = (hash) => {
    const parameters = new URLSearchParams(hash.replace(/^#/, ""));
    const plan = parameters.get("page-plan-file");
    state.plan = plan === null ? null : {name: "plan.json", content: plan};
    if (plan !== null) {
      byId("model").value = "";
      return true;
    }
    if (!parameters.has("model")) {
      return false;
    }
    byId(parameters.get("how") === "choose" ? "choose-plan" : "search-plan").checked = true;
    for (const [name, element] of elements) {
      element.value = parameters.get(name.slice(2)) ?? "";
    }
    byId(parameters.has("lora-rank") ? "lora" : "full").checked = true;
    for (const name of EXTRA) {
      byId(name).value = parameters.get(`page-${name}`) ?? "";
    }
    for (const kind of FILES) {
      const content = parameters.get(`page-${kind}-file`);
      state[kind] = content === null ? null : {name: byId(kind).value, content};
    }
    const point = Number(parameters.get("page-point") ?? NaN);
    state.point = Number.isInteger(point) ? point : null;
    return true;
  };
  return {words, files, wantsLargestBatch, estimateWords, wordsAfter, link, isTooLong, read, commandLine, state};
};
