"use strict";
(() => {
  const announcement = document.getElementById("announcement");
  const announce = (text) => { if (announcement) { announcement.textContent = text; } };

  const put = async (text) => {
    if (navigator.clipboard && window.isSecureContext) { await navigator.clipboard.writeText(text); return; }
    const area = document.createElement("textarea"); // plain http to another host has no clipboard object
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) { throw new Error("not allowed"); }
  };

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button[data-copy]");
    if (!button) { return; }
    try {
      await put(document.getElementById(button.dataset.copy).textContent);
      button.classList.add("done");
      announce("Copied.");
    } catch (error) { announce("The browser did not allow copying: select the text instead."); }
  });

  const results = document.querySelector("form.ask") !== null; // this form stays while people type
  const parts = results ? ["header", "#results"] : ["header", "main"];
  const renew = async () => {
    const address = location.href;
    const answer = await fetch(address, { cache: "no-store" });
    if (!answer.ok) { return; }
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    if (address !== location.href) { return; } // the user has changed the search meanwhile
    const open = [...document.querySelectorAll("details[open][id]")].map((one) => one.id);
    const focused = document.activeElement && document.activeElement.id;
    for (const name of parts) { document.querySelector(name).replaceWith(document.adoptNode(fresh.querySelector(name))); }
    for (const id of open) { const one = document.getElementById(id); if (one) { one.open = true; } }
    if (focused) { const one = document.getElementById(focused); if (one) { one.focus({ preventScroll: true }); } }
    if (document.title !== fresh.title) { announce("Updated: " + fresh.title); } // the title begins with the verdict
    document.title = fresh.title;
  };

  const ask = document.querySelector("form.ask");
  let waiting = 0;
  if (ask) {
    ask.addEventListener("input", () => {
      clearTimeout(waiting);
      waiting = setTimeout(async () => {
        const given = [...new FormData(ask)].filter(([, value]) => value);
        history.replaceState(null, "", "cluster" + (given.length ? "?" + new URLSearchParams(given) : ""));
        await renew();
        announce(document.getElementById("nodes").textContent);
      }, 250);
    });
  }

  const busy = () => !results && document.activeElement && document.activeElement.closest("form");
  const every = Number(document.body.dataset.renew); // seconds
  if (every) { setInterval(() => { if (!document.hidden && !busy()) { renew(); } }, 1000 * every); }
})();
