// Light, dark, or as the system has it. Loaded before the page is drawn, so that no other colour flashes up.
(() => {
  const root = document.documentElement;
  const choices = ["auto", "light", "dark"];
  const read = () => {
    try {
      const stored = localStorage.getItem("evsys-theme");
      return choices.includes(stored) ? stored : "auto";
    } catch {
      return "auto"; // storage may be forbidden
    }
  };
  const show = (choice) => {
    if (choice === "auto") delete root.dataset.theme;
    else root.dataset.theme = choice;
    for (const button of document.querySelectorAll("[data-theme-toggle]")) {
      button.textContent = { auto: "Auto", light: "Light", dark: "Dark" }[choice];
      button.setAttribute("aria-label", `Colours: ${choice === "auto" ? "system" : choice}`);
      button.title = "Colours: system, light or dark";
    }
    document.dispatchEvent(new CustomEvent("evsys-theme"));
  };
  show(read());
  document.addEventListener("DOMContentLoaded", () => {
    show(read());
    for (const button of document.querySelectorAll("[data-theme-toggle]")) {
      button.addEventListener("click", () => {
        const next = choices[(choices.indexOf(read()) + 1) % choices.length];
        try {
          localStorage.setItem("evsys-theme", next);
        } catch {
          // The choice then lasts for this page.
        }
        show(next);
      });
    }
  });
})();

// The first curves of a page are asked for before curves.js is there to draw them.
{
  const url = document.querySelector('meta[name="first-curves"]')?.content;
  if (url) {
    const asked = new URL(url, location.href).searchParams;
    const answer = fetch(url, { headers: { Accept: "application/json" } });
    answer.catch(() => {}); // curves.js, which waits for it, says so
    window.firstCurves = { answer, metrics: asked.getAll("metric"), width: Number(asked.get("width")) };
  }
}
