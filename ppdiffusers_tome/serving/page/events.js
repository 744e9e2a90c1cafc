// Reading server-sent events. EventSource reads them too, but cannot send a POST.

/** A reader of a text that grows: it returns the events that are complete since the last call, as objects. */
export function eventReader() {
  let read = 0; // characters
  return (text) => {
    const end = text.lastIndexOf("\n\n");
    if (end < read) return [];
    const parts = text.slice(read, end).split("\n\n");
    read = end + 2;
    const lines = parts.map((part) => part.split("\n").find((line) => line.startsWith("data: ")));
    return lines.filter(Boolean).map((line) => JSON.parse(line.slice(6)));
  };
}
