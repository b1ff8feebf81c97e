// Elements and buttons of the page. Texts are inserted as text, never as HTML.

export function made(name, className, parent) {
  const element = document.createElement(name);
  if (className) element.className = className;
  parent.append(element);
  return element;
}

export function button(text, className, parent, click) {
  const element = made("button", `quiet ${className}`, parent);
  Object.assign(element, { type: "button", textContent: text });
  element.addEventListener("click", click);
  return element;
}

// A button that copies what `text` returns when it is pressed.
export function copyButton(parent, text) {
  return button("Copy", "copy", parent, async ({ target }) => {
    await copy(text());
    target.textContent = "Copied";
    setTimeout(() => (target.textContent = "Copy"), 1500);
  });
}

// Browsers offer the clipboard only to encrypted pages and to pages of this machine.
async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = made("textarea", "unseen", document.body);
  field.value = text;
  field.select();
  document.execCommand("copy");
  field.remove();
}
