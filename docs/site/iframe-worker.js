/* Lets the search work where the site is opened as files. Browsers refuse workers there, so the
   script of the worker runs in a hidden frame instead. Elsewhere nothing is changed. */
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(script) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.documentElement.append(this.frame);
      this.ready = new Promise((resolve) => {
        this.frame.onload = resolve; // an empty frame has loaded already: this is the script
      });
      const inside = this.frame.contentWindow;
      const page = this.frame.contentDocument;
      page.open();
      inside.postMessage = (message) => {
        const data = structuredClone(message); // as a worker gets it: the search changes its copy
        setTimeout(() => this.onmessage?.(new MessageEvent("message", { data })));
      };
      page.write(`<script src="${new URL(script, location.href)}"></scr` + "ipt>");
      page.close();
    }

    postMessage(message) {
      const data = structuredClone(message);
      this.ready.then(() => {
        setTimeout(() => this.frame.contentWindow?.onmessage(new MessageEvent("message", { data })));
      });
    }

    terminate() {
      this.frame.remove();
    }
  };
}
