// Keeps the page's end in view while an answer grows, until the reader scrolls up, and again after they scroll back.

const NEAR = 40; // a reader who scrolls down to this many pixels above the end is at the end
const page = document.scrollingElement;
let following = false;
let last = 0;

function toEnd() {
  if (!following) return;
  page.scrollTop = page.scrollHeight;
  last = page.scrollTop; // the reader may scroll up before the event of this scroll arrives
}

export function follow() {
  following = true;
  toEnd();
}

export function begin(...watched) {
  addEventListener("scroll", () => {
    const left = page.scrollHeight - page.clientHeight - page.scrollTop;
    if (page.scrollTop < last && left > 2) following = false; // the reader scrolled; the page did not become shorter
    else if (page.scrollTop > last && left < NEAR) following = true;
    last = page.scrollTop;
  });
  addEventListener("resize", toEnd);
  const sizes = new ResizeObserver(toEnd);
  for (const element of watched) sizes.observe(element);
}
