// Keeps the page's end in view while an answer grows, until the reader scrolls up, and again once they are back there.

const NEAR = 40; // pixels above the end that count as the end, to a reader who scrolls down
const page = document.scrollingElement;
let following = false;
let last = 0;

function toEnd() {
  if (!following) return;
  page.scrollTop = page.scrollHeight;
  last = page.scrollTop; // a reader may scroll up before the event of this comes
}

export function follow() {
  following = true;
  toEnd();
}

export function begin(...watched) {
  addEventListener("scroll", () => {
    const left = page.scrollHeight - page.clientHeight - page.scrollTop;
    if (page.scrollTop < last && left > 2) following = false; // not where the page became shorter
    else if (page.scrollTop > last && left < NEAR) following = true;
    last = page.scrollTop;
  });
  addEventListener("resize", toEnd);
  const sizes = new ResizeObserver(toEnd);
  for (const element of watched) sizes.observe(element);
}
