// Ask the server what changed and say so. Pauses while the page is hidden, and waits longer while the server is away.
const SHORTEST = 2000;
const LONGEST = 30000;

// `onChange({experiments: [ids], runs: [ids]})` is called for each answer that names something.
export const watch = (onChange, { project = document.body.dataset.project, since = "" } = {}) => {
  let cursor = since;
  let wait = SHORTEST;
  let timer = 0;
  const state = (text) => {
    for (const mark of document.querySelectorAll("[data-live]")) {
      mark.dataset.live = text;
      mark.textContent = text === "on" ? "live" : "not connected";
    }
  };
  const ask = async () => {
    try {
      const url = `/api/v1/projects/${encodeURIComponent(project)}/changes?${new URLSearchParams({ since: cursor })}`;
      const answer = await fetch(url, { headers: { Accept: "application/json" }, credentials: "same-origin" });
      if (!answer.ok) throw new Error(`${answer.status}`);
      const found = await answer.json();
      cursor = String(found.cursor ?? cursor);
      if (found.experiments?.length || found.runs?.length) await onChange(found);
      wait = SHORTEST;
      state("on");
    } catch {
      wait = Math.min(LONGEST, wait * 2);
      state("off");
    }
    timer = document.hidden ? 0 : setTimeout(ask, wait);
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && !timer) ask();
  });
  timer = setTimeout(ask, SHORTEST);
};
