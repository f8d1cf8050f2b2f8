// Keeps parts of a page up to date: the page is fetched again, and elements with `data-live` (seconds) are replaced.
"use strict";

const parts = [...document.querySelectorAll("[data-live]")];
const due = new Map(parts.map((part) => [part.id, 0]));
let running = false;

async function refresh() {
  if (document.hidden || running) return;
  const now = performance.now() / 1000;
  const wanted = parts.filter((part) => due.get(part.id) <= now && !part.contains(document.activeElement));
  if (!wanted.length) return;
  running = true;
  try {
    const response = await fetch(location.href, { credentials: "same-origin", cache: "no-store" });
    if (response.redirected) {
      location.reload(); // the session has ended
      return;
    }
    if (!response.ok) return;
    const fresh = new DOMParser().parseFromString(await response.text(), "text/html");
    for (const part of wanted) {
      const next = fresh.getElementById(part.id);
      if (next && next.innerHTML !== part.innerHTML) part.replaceChildren(...next.childNodes);
      due.set(part.id, now + Number(part.dataset.live));
    }
    document.documentElement.dataset.refreshed = String(Number(document.documentElement.dataset.refreshed || 0) + 1);
  } catch {
    // the service restarts; the next attempt shows it
  } finally {
    running = false;
  }
}

if (parts.length) {
  for (const part of parts) due.set(part.id, performance.now() / 1000 + Number(part.dataset.live));
  setInterval(refresh, 1000);
}

const tokens = document.getElementById("tokens");
if (tokens) {
  const show = (event) => {
    const token = event.target.closest(".t");
    if (!token) return;
    const { old, new: trained, advantage, ids } = token.dataset;
    const mismatch = Math.abs(Number(trained) - Number(old)).toPrecision(3);
    document.getElementById("token-facts").textContent =
      `${JSON.stringify(token.textContent)} (id ${ids}): sampled ${old}, trained ${trained}, mismatch ${mismatch}, advantage ${advantage}`;
  };
  tokens.addEventListener("pointerover", show);
  tokens.addEventListener("focusin", show);
}
