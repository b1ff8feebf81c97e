// Dialogues that are kept in this browser. Each is an entry of its own, so that tabs do not overwrite each other's.

const PREFIX = `eagle3-serve-dialogue ${location.pathname} `;

export const newId = () => `${Date.now()}-${Math.random()}`;

// Keeps a dialogue, or forgets it if it has no turns. Throws if the browser's storage is full.
export function keep(id, dialogue) {
  if (dialogue.turns.length) localStorage.setItem(PREFIX + id, JSON.stringify({ ...dialogue, time: Date.now() }));
  else forget(id);
}

export const forget = (id) => localStorage.removeItem(PREFIX + id);

// Returns a dialogue, or null if there is none, or if another version of this page stored it.
export function kept(id) {
  try {
    const dialogue = JSON.parse(localStorage.getItem(PREFIX + id));
    return dialogue?.turns.every(({ text, reply }) => text && reply.said && reply.counts) ? dialogue : null;
  } catch {
    return null;
  }
}

// Returns all dialogues with their ids, the newest first.
export function list() {
  const ids = Object.keys(localStorage).filter((key) => key.startsWith(PREFIX)).map((key) => key.slice(PREFIX.length));
  const all = ids.map((id) => ({ id, ...kept(id) })).filter(({ turns }) => turns);
  return all.sort((one, other) => other.time - one.time);
}
