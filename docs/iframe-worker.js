// Search in a site that is opened from the disk. Browsers start no worker there, so the worker's
// script runs in a hidden frame. The plugin `offline` would load such a shim from the network.
if (location.protocol === "file:") {
  window.Worker = class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = Object.assign(document.createElement("iframe"), { hidden: true });
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = Object.assign(this.inner.document.createElement("script"), { src: url });
      this.ready = new Promise((resolve) => script.addEventListener("load", resolve));
      this.inner.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}
