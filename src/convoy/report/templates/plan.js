// Says beside the network what the title of a box says, also where nothing hovers; at first of the box that takes longest.
const detail = document.querySelector(".detail");
let shown = null;
function show(box) {
  if (box === shown) return;
  if (shown) shown.classList.remove("shown");
  shown = box;
  box.classList.add("shown");
  const [name, ...lines] = box.querySelector("title").textContent.split("\n");
  const head = document.createElement("h3");
  head.textContent = name;
  const list = document.createElement("dl");
  for (const line of lines) {
    const at = line.indexOf(": ");
    const term = document.createElement("dt"), text = document.createElement("dd");
    term.textContent = line.slice(0, at);
    text.textContent = line.slice(at + 2);
    list.append(term, text);
  }
  detail.replaceChildren(head, list);
}
const boxes = [...document.querySelectorAll(".box")];
if (boxes.length) show(boxes.reduce((most, box) => (Number(box.dataset.spent) > Number(most.dataset.spent) ? box : most)));
for (const box of boxes) {
  for (const kind of ["pointerenter", "focus", "click"]) box.addEventListener(kind, () => show(box));
}
