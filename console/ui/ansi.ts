// Terminal output as spans. Colours and fonts are kept, all other control sequences are dropped.
import { visible } from "./text.tsx";

export interface Style {
  class: string; // of colours and fonts in style.css
  color?: string; // of the 256 and the true colours
  background?: string;
}

export interface Span extends Style {
  text: string;
}

const palette = (n: number): string => {
  if (n < 232) {
    const level = (v: number) => v ? 55 + 40 * v : 0;
    const i = n - 16;
    return `rgb(${level(Math.floor(i / 36))} ${level(Math.floor(i / 6) % 6)} ${level(i % 6)})`;
  }
  const grey = 8 + 10 * (n - 232);
  return `rgb(${grey} ${grey} ${grey})`;
};

const maxEscape = 4096; // characters of an unfinished escape sequence, after which it counts as text

// Terminal turns pieces of output into spans. A piece may end within an escape sequence.
export class Terminal {
  private fonts = new Set<string>();
  private fore = "";
  private back = "";
  private rest = "";

  write(piece: string): Span[] {
    const text = this.rest + piece;
    this.rest = "";
    const spans: Span[] = [];
    let at = 0;
    const plain = (until: number) => {
      if (until > at) spans.push({ ...this.style(), text: visible(text.slice(at, until).replace(/\r(?=\n|$)/g, "")) });
    };
    for (let i = text.indexOf("\x1b"); i >= 0; i = text.indexOf("\x1b", at)) {
      plain(i);
      const end = this.escape(text, i);
      if (end < 0 && text.length - i < maxEscape) {
        this.rest = text.slice(i);
        return spans;
      }
      at = end < 0 ? i + 1 : end;
    }
    plain(text.length);
    return spans;
  }

  // escape interprets the sequence at i. It returns the index after the sequence, or -1 if the sequence is unfinished.
  private escape(text: string, i: number): number {
    const kind = text[i + 1];
    if (kind === undefined) return -1;
    if (kind === "[") {
      for (let j = i + 2; j < text.length; j++) {
        const c = text.charCodeAt(j);
        if (c >= 0x40 && c <= 0x7e) {
          if (text[j] === "m") this.select(text.slice(i + 2, j));
          return j + 1;
        }
        if (c < 0x20 || c > 0x3f) return j; // not a sequence
      }
      return -1;
    }
    if ("]PX^_".includes(kind)) { // strings, such as titles and links
      for (let j = i + 2; j < text.length; j++) {
        if (text[j] === "\x07") return j + 1;
        if (text[j] === "\x1b") return text[j + 1] === undefined ? -1 : j + (text[j + 1] === "\\" ? 2 : 0);
      }
      return -1;
    }
    return i + 2;
  }

  // select sets colours and fonts from the codes of a sequence.
  private select(codes: string) {
    const list = codes.split(/[;:]/).map(Number);
    for (let i = 0; i < list.length; i++) {
      const n = list[i] || 0;
      if (n === 0) this.fonts.clear(), this.fore = this.back = "";
      else if (n === 1) this.fonts.add("bold");
      else if (n === 2) this.fonts.add("dim");
      else if (n === 3) this.fonts.add("italic");
      else if (n === 4) this.fonts.add("underline");
      else if (n === 22) this.fonts.delete("bold"), this.fonts.delete("dim");
      else if (n === 23) this.fonts.delete("italic");
      else if (n === 24) this.fonts.delete("underline");
      else if (n >= 30 && n <= 37) this.fore = `a${n - 30}`;
      else if (n >= 90 && n <= 97) this.fore = `a${n - 82}`;
      else if (n === 39) this.fore = "";
      else if (n >= 40 && n <= 47) this.back = `b${n - 40}`;
      else if (n >= 100 && n <= 107) this.back = `b${n - 92}`;
      else if (n === 49) this.back = "";
      else if (n === 38 || n === 48) {
        let color = "";
        if (list[i + 1] === 5) {
          const index = list[i + 2] & 255;
          color = index < 16 ? `${n === 38 ? "a" : "b"}${index}` : palette(index);
          i += 2;
        } else if (list[i + 1] === 2) {
          color = `rgb(${list.slice(i + 2, i + 5).map((v) => v & 255).join(" ")})`;
          i += 4;
        }
        if (n === 38) this.fore = color;
        else this.back = color;
      }
    }
  }

  private style(): Style {
    const classes = [...this.fonts];
    const style: Style = { class: "" };
    if (this.fore.startsWith("rgb")) style.color = this.fore;
    else if (this.fore) classes.push(this.fore);
    if (this.back.startsWith("rgb")) style.background = this.back;
    else if (this.back) classes.push(this.back);
    style.class = classes.join(" ");
    return style;
  }
}
