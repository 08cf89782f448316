// <button data-perfetto="https://…" data-trace="/…"> opens Perfetto and hands it the trace.
//
// Perfetto's protocol (perfetto.dev/docs/visualization/deep-linking-to-perfetto-ui): PING its window until it answers
// PONG, then post the trace. Both sides look at the other's origin.
const PING_MS = 200;
const PATIENCE_MS = 60_000;

document.addEventListener("click", async (event) => {
  const button = event.target.closest?.("[data-perfetto]");
  if (!button) return;
  const report = (text) => { button.parentElement.querySelector("output").textContent = text; };
  const viewer = window.open(button.dataset.perfetto, "_blank");
  if (!viewer) {
    report("The browser did not open the tab: let this page open pop-ups.");
    return;
  }
  report("Handing the trace to Perfetto …");
  try {
    const answered = pong(viewer, new URL(button.dataset.perfetto).origin);
    const response = await fetch(button.dataset.trace);
    if (!response.ok) throw new Error(response.statusText);
    const buffer = await response.arrayBuffer();
    const origin = await answered;
    const fileName = button.dataset.trace.split("/").pop();
    viewer.postMessage({ perfetto: { buffer, title: button.dataset.title, fileName } }, origin);
    report("Perfetto has the trace.");
  } catch (error) {
    report(`${error.message}. Download the trace, and open it there.`);
  }
});

function pong(viewer, origin) {
  return new Promise((resolve, reject) => {
    const began = performance.now();
    const end = (settle, value) => {
      window.clearInterval(timer);
      window.removeEventListener("message", listen);
      settle(value);
    };
    const listen = (event) => {
      if (event.source === viewer && event.origin === origin && event.data === "PONG") end(resolve, origin);
    };
    const timer = window.setInterval(() => {
      if (viewer.closed) end(reject, new Error("The tab was closed"));
      else if (performance.now() - began > PATIENCE_MS) end(reject, new Error("Perfetto does not answer"));
      else viewer.postMessage("PING", origin);
    }, PING_MS);
    window.addEventListener("message", listen);
  });
}
