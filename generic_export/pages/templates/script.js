// Without script all details are open, and nothing is missing.
(function () {
  const root = document.documentElement;
  root.classList.add("script");
  document.getElementById("theme").addEventListener("click", () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  });

  const rows = Array.from(document.querySelectorAll("tr.row"));
  const detail = (row) => row.querySelector(".opener") && row.nextElementSibling;
  function open(row, wanted) {
    if (!detail(row)) return;
    detail(row).classList.toggle("open", wanted);
    const button = row.querySelector(".opener");
    button.setAttribute("aria-expanded", String(wanted));
    button.textContent = wanted ? "\u25be" : "\u25b8";
  }
  rows.forEach((row) => row.addEventListener("click", (event) => {
    if (detail(row) && !event.target.closest("a")) open(row, !detail(row).classList.contains("open"));
  }));

  const search = document.getElementById("search"), only = document.getElementById("only"), all = document.getElementById("all");
  function filter() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const few = only.getAttribute("aria-pressed") === "true";
    let shown = 0;
    rows.forEach((row) => {
      const text = row.dataset.text || row.textContent.toLowerCase();
      row.hidden = (few && !row.classList.contains("kept")) || !words.every((word) => text.includes(word));
      if (detail(row)) detail(row).hidden = row.hidden;
      shown += !row.hidden;
    });
    document.getElementById("shown").textContent = shown === rows.length ? "" : shown + " of " + rows.length + " shown";
  }
  if (search) {
    search.addEventListener("input", filter);
    only.addEventListener("click", () => {
      only.setAttribute("aria-pressed", String(only.getAttribute("aria-pressed") !== "true"));
      filter();
    });
  }
  if (all) {
    all.addEventListener("click", () => {
      const wanted = all.textContent === "Open all";
      rows.forEach((row) => open(row, wanted));
      all.textContent = wanted ? "Close all" : "Open all";
    });
  }

  function follow() {
    const target = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target && target.classList.contains("row")) { open(target, true); target.scrollIntoView({ block: "center" }); }
  }
  addEventListener("hashchange", follow);
  follow();
})();
