"use strict";
// Shows one row at a time: a block for each document, a span for each cell (a token, or the few that are one character).
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (name) => document.getElementById("viewer-" + name);
  const viewer = document.getElementById("viewer");
  const [choice, summary, pane, info] = ["row", "summary", "pane", "info"].map(byId);
  const borders = viewer.querySelector("[data-do=borders]");
  const control = new Set(data.control);
  if (!data.rows.length) {
    for (const control of viewer.querySelectorAll("button, select")) control.disabled = true;
    return;
  }
  const number = (value) => value.toLocaleString("en");
  const many = (value, one) => `${number(value)} ${one}${value === 1 ? "" : "s"}`;

  let row;      // of data.rows
  let cells;    // what each cell shows: an index of data.texts
  let starts;   // first token of each cell; one more at the end
  let spans;    // the element of each cell
  let at;       // the cell where the cursor is

  // ---------------------------------------------------------------------------------------- a row

  function unpack(packed) {
    const bytes = Uint8Array.from(atob(packed), (sign) => sign.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    const read = data.bytes === 2 ? (i) => view.getUint16(2 * i, true) : (i) => view.getUint32(4 * i, true);
    return Array.from({ length: bytes.length / data.bytes }, (_, i) => read(i));
  }

  // How many of rising numbers are not above a value.
  function upTo(numbers, value) {
    let [low, high] = [0, numbers.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[middle] <= value) low = middle + 1; else high = middle;
    }
    return low;
  }

  const idsOf = (cell) => [data.ids[cells[cell]]].flat();
  const cellOf = (token) => upTo(starts, token) - 1;
  const isTarget = (token) => upTo(row.targets, token) % 2 === 1;
  const documentOf = (token) => upTo(row.bounds, token) - 1;

  function open(index) {
    row = data.rows[index];
    choice.value = String(index);
    cells = unpack(row.cells);
    starts = [0];
    for (let i = 0; i < cells.length; i++) starts.push(starts[i] + idsOf(i).length);
    spans = [];
    at = -1;
    const blocks = row.docs.map((_, i) => block(i));
    pane.replaceChildren(...blocks, ...endOfRow());
    pane.scrollTop = 0;
    summary.textContent = `Row ${number(row.row)}: ` +
      `${many(row.num_pieces, "piece")}, ${many(row.length, "token")}, ${many(row.num_targets, "target")}, ` +
      `${number(data.max_tokens - row.length)} padding`;
    show();
  }

  function block(i) {
    const [first, stop] = [row.bounds[i], row.bounds[i + 1]];
    const made = node("article", "document");
    const head = node("h3", "", `Document ${number(row.docs[i])}` + (row.pieces[i] ? `, piece ${row.pieces[i]}` : ""));
    head.append(node("span", "", `tokens ${number(first)} to ${number(stop - 1)} · ${many(stop - first, "token")}, ` +
      many(row.learned[i], "target")));
    const body = node("div", "text");
    let run;
    for (let cell = cellOf(first); cell < cells.length && starts[cell] < stop; cell++) {
      const kind = isTarget(starts[cell]) ? "target" : "other";
      if (!run || run.className !== kind) body.append(run = node("span", kind));
      run.append(spans[cell] = span(cell));
    }
    made.append(head, body);
    return made;
  }

  function span(cell) {
    const made = node("span", control.has(cells[cell]) ? "token control" : "token");
    const parts = data.texts[cells[cell]].split("\n");
    parts.forEach((part, i) => {
      if (i) made.append(node("i", "nl"), "\n");
      if (part) made.append(part);
    });
    made.cell = cell;
    return made;
  }

  function endOfRow() {
    const padding = data.max_tokens - row.length;
    const lines = [];
    if (row.shown < row.length) {
      lines.push(`Tokens ${number(row.shown)} to ${number(row.length - 1)} are not on this page.`);
    }
    if (padding) {
      lines.push(`Padding: ${many(padding, "token")}, ${number(row.length)} to ${number(data.max_tokens - 1)}`);
    }
    return lines.map((line) => node("p", "folded", line));
  }

  function node(name, kind, text) {
    const made = document.createElement(name);
    if (kind) made.className = kind;
    if (text) made.textContent = text;
    return made;
  }

  // ---------------------------------------------------------------------------------------- a token

  function describe(cell) {
    const [ids, first] = [idsOf(cell), starts[cell]];
    const last = first + ids.length - 1;
    const i = documentOf(first);
    const places = ids.length > 1 ? `tokens ${number(first)} to ${number(last)}` : `token ${number(first)}`;
    return `${places} · ${ids.length > 1 ? "ids" : "id"} ${ids.join(", ")} · ${JSON.stringify(data.texts[cells[cell]])} · ` +
      `${isTarget(first) ? "target" : "no target"} · ` +
      `document ${number(row.docs[i])}, position ${number(first - row.bounds[i])}`;
  }

  // What is said is read aloud; what the pointer passes is not.
  function say(text, live = true) {
    info.setAttribute("aria-live", live ? "polite" : "off");
    info.textContent = text;
  }

  // The token at the cursor, without a word.
  const show = () => say(at < 0 ? "Point at a token, or move with the arrow keys." : describe(at), false);

  function go(cell) {
    if (at >= 0) spans[at].classList.remove("cursor");
    at = Math.max(0, Math.min(cell, cells.length - 1));
    spans[at].classList.add("cursor");
    spans[at].scrollIntoView({ block: "nearest", inline: "nearest" });
    say(describe(at));
  }

  function goToDocument(i) {
    if (!(i in row.docs)) {
      say(i < 0 ? "This is the row's first document." : "This is the last document shown of this row.");
      return;
    }
    go(cellOf(row.bounds[i]));
    const head = pane.children[i].getBoundingClientRect().top;
    pane.scrollTop += head - pane.getBoundingClientRect().top - pane.clientTop;
  }

  function goToTargets(step) {
    const token = isInSight() ? starts[at] : row.bounds[atTop()] - (step > 0 ? 1 : 0);
    const firsts = row.targets.filter((_, i) => i % 2 === 0);
    const found = step > 0 ? firsts.find((place) => place > token) : firsts.findLast((place) => place < token);
    if (found === undefined) say(`No targets ${step > 0 ? "after" : "before"} this token in what is shown.`);
    else go(cellOf(found));
  }

  function goToRow(step) {
    const index = Number(choice.value) + step;
    if (index in data.rows) open(index);
    else say(step > 0 ? "This is the last row on this page." : "This is the first row on this page.");
  }

  // Whether the cursor is set and can be seen; where it is not, the reader is at the document at the top of the pane.
  function isInSight() {
    if (at < 0) return false;
    const [cursor, box] = [spans[at], pane].map((element) => element.getBoundingClientRect());
    return cursor.bottom > box.top && cursor.top < box.bottom;
  }

  function atTop() {
    const top = pane.getBoundingClientRect().top + pane.clientTop;
    return [...pane.children].findIndex((child) => child.getBoundingClientRect().bottom > top + 1);
  }

  const here = () => (isInSight() ? documentOf(starts[at]) : atTop());
  const step = (by) => go(at < 0 ? cellOf(row.bounds[atTop()]) : at + by);
  const acts = {
    "row-back": () => goToRow(-1),
    "row-on": () => goToRow(1),
    "document-back": () => goToDocument(here() - 1),
    "document-on": () => goToDocument(here() + 1),
    "target-on": () => goToTargets(1),
    "target-back": () => goToTargets(-1),
    "token-back": () => step(-1),
    "token-on": () => step(1),
    first: () => go(0),
    last: () => go(cells.length - 1),
    choose: () => choice.focus(),
    borders: () => borders.setAttribute("aria-pressed", String(viewer.classList.toggle("borders"))),
  };
  const keys = {
    k: "row-back", j: "row-on", p: "document-back", n: "document-on", t: "target-on", r: "choose", b: "borders",
    arrowleft: "token-back", arrowright: "token-on", home: "first", end: "last",
  };

  viewer.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    const token = event.target.closest(".token");
    if (button) acts[button.dataset.do]();
    else if (token && pane.contains(token)) go(token.cell);
  });
  viewer.addEventListener("keydown", (event) => {
    const key = event.key.toLowerCase();
    const act = key === "t" && event.shiftKey ? "target-back" : keys[key];
    if (!act || event.target === choice || event.ctrlKey || event.altKey || event.metaKey) return;
    event.preventDefault();
    acts[act]();
  });
  pane.addEventListener("pointermove", (event) => {
    if (!event.movementX && !event.movementY) return;  // the text moved under a pointer that rests
    const token = event.target.closest(".token");
    if (token) say(describe(token.cell), false);
  });
  pane.addEventListener("mouseleave", show);
  choice.addEventListener("change", () => open(Number(choice.value)));
  for (const link of document.querySelectorAll("a[data-row]")) {  // rows that other sections name
    link.addEventListener("click", (event) => {
      event.preventDefault();  // going to a part of the page would take the focus away again
      open(data.rows.findIndex((held) => held.row === Number(link.dataset.row)));
      viewer.scrollIntoView();
      pane.focus({ preventScroll: true });
    });
  }
  open(0);
})();
