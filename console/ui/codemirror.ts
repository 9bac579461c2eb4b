// The editor. Its styles are adopted sheets of a shadow tree, which the page's policy allows.
import { defaultKeymap, history, historyKeymap, indentWithTab } from "@codemirror/commands";
import { bracketMatching, HighlightStyle, indentUnit, StreamLanguage, syntaxHighlighting } from "@codemirror/language";
import { javascript, typescript } from "@codemirror/legacy-modes/mode/javascript";
import { python } from "@codemirror/legacy-modes/mode/python";
import { ruby } from "@codemirror/legacy-modes/mode/ruby";
import { shell } from "@codemirror/legacy-modes/mode/shell";
import { yaml } from "@codemirror/legacy-modes/mode/yaml";
import { Compartment, EditorState } from "@codemirror/state";
import { drawSelection, EditorView, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
import { tags } from "@lezer/highlight";

const modes: Record<string, Parameters<typeof StreamLanguage.define>[0]> = {
  python,
  ruby,
  yaml,
  bash: shell,
  node: javascript,
  deno: typescript,
};

const theme = EditorView.theme({
  "&": { fontSize: "13px", color: "var(--text)", backgroundColor: "var(--field)", maxHeight: "60vh" },
  ".cm-content": { fontFamily: "var(--mono)", minHeight: "12em", caretColor: "var(--text)" },
  ".cm-gutters": { backgroundColor: "var(--panel)", color: "var(--faint)", border: "none" },
  ".cm-activeLine, .cm-activeLineGutter": { backgroundColor: "var(--hover)" },
  "&.cm-focused": { outline: "2px solid var(--accent)" },
  ".cm-cursor": { borderLeftColor: "var(--text)" },
  ".cm-selectionBackground": { backgroundColor: "var(--selection) !important" },
});

const colours = HighlightStyle.define([
  { tag: tags.keyword, color: "var(--s3)" },
  { tag: [tags.string, tags.special(tags.string), tags.regexp], color: "var(--good)" },
  { tag: [tags.number, tags.bool, tags.atom], color: "var(--wait)" },
  { tag: tags.comment, color: "var(--faint)", fontStyle: "italic" },
  { tag: [tags.definition(tags.name), tags.typeName, tags.meta], color: "var(--accent)" },
]);

// open creates an editor in an element.
export function open(at: HTMLElement, label: string, language: string, text: string, changed: (text: string) => void) {
  const root = at.attachShadow({ mode: "open" });
  const mode = new Compartment();
  const of = (name: string) => modes[name] ? StreamLanguage.define(modes[name]) : [];
  let shown = language;
  const view = new EditorView({
    parent: root as unknown as Element,
    root,
    state: EditorState.create({
      doc: text,
      extensions: [
        lineNumbers(),
        EditorView.lineWrapping,
        history(),
        drawSelection(),
        bracketMatching(),
        highlightActiveLine(),
        indentUnit.of("    "),
        syntaxHighlighting(colours),
        mode.of(of(language)),
        theme,
        EditorView.contentAttributes.of({ "aria-label": label }),
        // Escape leaves the editor, so that Tab can be typed and the keyboard is not trapped.
        keymap.of([
          { key: "Escape", run: (v) => (v.contentDOM.blur(), true) },
          ...defaultKeymap,
          ...historyKeymap,
          indentWithTab,
        ]),
        EditorView.updateListener.of((u) => u.docChanged && changed(u.state.doc.toString())),
      ],
    }),
  });
  view.scrollDOM.tabIndex = 0; // so that a keyboard can scroll it
  return {
    set(text: string, language: string) {
      if (language !== shown) {
        shown = language;
        view.dispatch({ effects: mode.reconfigure(of(language)) });
      }
      const now = view.state.doc.toString();
      if (text !== now) view.dispatch({ changes: { from: 0, to: now.length, insert: text } });
    },
    close: () => view.destroy(),
  };
}
