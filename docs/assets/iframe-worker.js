// Browsers start no workers for pages that are opened as files. The search needs one: there it runs in
// a hidden frame, whose own empty document may be reached from the page.
if (location.protocol === "file:") {
  const load = (frame, url) =>
    new Promise((resolve, reject) => {
      const script = frame.document.createElement("script");
      script.src = url;
      script.onload = resolve;
      script.onerror = () => reject(new Error(`cannot load ${url}`));
      frame.document.head.append(script);
    });

  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const element = document.createElement("iframe");
      element.hidden = true;
      document.documentElement.append(element);
      this.element = element;
      this.frame = element.contentWindow;
      this.frame.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      // A worker's own blocks; that of the theme waits for a promise too.
      this.frame.importScripts = (...urls) =>
        urls.reduce((before, each) => before.then(() => load(this.frame, each)), Promise.resolve());
      this.ready = load(this.frame, url);
    }

    postMessage(data) {
      this.ready = this.ready.then(() =>
        this.frame.dispatchEvent(new MessageEvent("message", { data })),
      );
    }

    terminate() {
      this.element.remove();
    }
  };
}
