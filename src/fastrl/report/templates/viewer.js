"use strict";
// A page of a run that goes on loads itself again. Not by the browser's own refresh, which behind a link into the page
// (#part-1-setup) would only go there once more.
const every = Number(document.body.dataset.every);
if (every > 0) setTimeout(() => location.reload(), 1000 * every);

// One group at a time, by buttons and keys. Without this script all groups are there, one below the other.
for (const viewer of document.querySelectorAll(".viewer")) {
  const groups = Array.from(viewer.querySelectorAll(".group"));
  const where = viewer.querySelector(".where");
  const buttons = Array.from(viewer.querySelectorAll("button[data-go]"));
  const last = groups.length - 1;
  const memory = "fastrl-group-" + viewer.dataset.name; // a page that loads itself again shows the same group
  let shown = 0;

  function remember(index) {
    try { sessionStorage.setItem(memory, String(index)); } catch { /* storage is forbidden: start at the first */ }
  }

  function recall() {
    try { return Number(sessionStorage.getItem(memory)) || 0; } catch { return 0; }
  }

  function show(index) {
    shown = Math.max(0, Math.min(last, index));
    groups.forEach((group, place) => { group.hidden = place !== shown; });
    where.textContent = "Group " + (shown + 1) + " of " + groups.length + ": " + groups[shown].dataset.title;
    for (const button of buttons) {
      const toStart = button.dataset.go === "first" || button.dataset.go === "previous";
      // aria-disabled, not disabled: a button that is disabled while it has the focus loses it.
      button.setAttribute("aria-disabled", String(shown === (toStart ? 0 : last)));
    }
    remember(shown);
  }

  const go = {
    first: () => show(0),
    previous: () => show(shown - 1),
    next: () => show(shown + 1),
    last: () => show(last),
  };
  const keys = { ArrowLeft: "previous", ArrowRight: "next", Home: "first", End: "last" };

  for (const button of buttons) button.addEventListener("click", go[button.dataset.go]);
  viewer.addEventListener("keydown", (event) => {
    const action = keys[event.key];
    const inText = event.target.closest("pre, .scroll"); // there the keys scroll
    if (!action || event.altKey || event.ctrlKey || event.metaKey || event.shiftKey || inText) return;
    event.preventDefault();
    go[action]();
  });
  viewer.querySelector(".buttons").hidden = false;
  show(recall());
}
