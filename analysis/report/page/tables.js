// Tables and legends as elements of a page. Texts are set as text, never as markup.
"use strict";

const tables = (() => {
  const element = (tag, text, ...children) => {
    const made = document.createElement(tag);
    if (text !== null) {
      made.textContent = text;
    }
    made.append(...children);
    return made;
  };
  // The first column heads its row; `numbers` are the columns that are set to the right.
  const table = (caption, head, rows, numbers) => {
    const cells = (texts, tagOf, scope) => element("tr", null, ...texts.map((text, i) => {
      const cell = element(tagOf(i), text);
      if (tagOf(i) === "th") {
        cell.scope = scope;
      }
      cell.className = numbers.includes(i) ? "number" : "";
      return cell;
    }));
    const made = element("table", null, ...(caption === "" ? [] : [element("caption", caption)]),
      element("thead", null, cells(head, () => "th", "col")),
      element("tbody", null, ...rows.map((row) => cells(row, (i) => i === 0 ? "th" : "td", "row"))));
    const scroll = element("div", null, made);
    scroll.className = "scroll";
    scroll.setAttribute("role", "group");
    scroll.setAttribute("aria-label", caption || head.join(", "));
    // A table wider than the page is scrolled by keys.
    new ResizeObserver(() => { scroll.tabIndex = scroll.scrollWidth > scroll.clientWidth ? 0 : -1; }).observe(scroll);
    return scroll;
  };
  // Boxes of classes of the style sheet, with their names: [class, name].
  const legend = (list, entries) => d3.select(list).selectAll("li").data(entries).enter().append("li").each(([style, name], i, items) => {
    d3.select(items[i]).append("svg").attr("viewBox", "0 0 14 14").attr("aria-hidden", "true")
      .append("rect").attr("class", style).attr("width", 14).attr("height", 14);
    items[i].append(name.replaceAll("_", " "));
  });
  const showLegends = (data) => {
    const used = new Set(data.ops.colour), {categories} = data.recordings[0].memory;
    const of = (style, names, isShown) => names.map((name, i) => [`${style}${i}`, name, i]).filter(([, name, i]) => isShown(name, i));
    legend(document.querySelector("#timeline .legend"), [...of("op", data.colours, (name, i) => used.has(i) || name === "host"),
      ["wait", "compute waits (hatched)"]]);
    legend(document.querySelector("#memory .legend"), of("memory", data.category_names, (name) => categories[name] !== undefined));
  };
  return {element, table, showLegends};
})();
