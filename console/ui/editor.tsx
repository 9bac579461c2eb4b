// An editor for programs. It is loaded on first use. Until then, and if loading fails, a text field takes its place.
import { useEffect, useRef, useState } from "preact/hooks";

export function Editor({ label, language, value, onInput }: {
  label: string;
  language: string;
  value: string;
  onInput: (text: string) => void;
}) {
  const at = useRef<HTMLDivElement>(null);
  const view = useRef<{ set(text: string, language: string): void; close(): void }>(undefined);
  const latest = useRef({ value, language, onInput }); // what is typed before the editor is there must be in it
  latest.current = { value, language, onInput };
  const [ready, setReady] = useState(false);
  useEffect(() => {
    let gone = false;
    import("./codemirror.ts").then(({ open }) => {
      if (gone || !at.current) return;
      const { value, language } = latest.current;
      view.current = open(at.current, label, language, value, (text) => latest.current.onInput(text));
      setReady(true);
    }, () => {}); // the text field stays
    return () => {
      gone = true;
      view.current?.close();
    };
  }, []);
  useEffect(() => view.current?.set(value, language), [value, language]);
  return (
    <div class="editor">
      <div ref={at} />
      {!ready && (
        <textarea
          rows={12}
          aria-label={label}
          spellcheck={false}
          value={value}
          onInput={(e) => onInput(e.currentTarget.value)} />
      )}
    </div>
  );
}
