// Reading server-sent events. EventSource reads them too, but cannot send a POST.

/** Make a reader of a text that grows: each call returns the events that were completed since the last one. */
export function eventReader() {
  let read = 0; // characters read so far
  return (text) => {
    const end = text.lastIndexOf("\n\n");
    if (end < read) return [];
    const parts = text.slice(read, end).split("\n\n");
    read = end + 2;
    const lines = parts.map((part) => part.split("\n").find((line) => line.startsWith("data: ")));
    return lines.filter(Boolean).map((line) => JSON.parse(line.slice(6)));
  };
}
