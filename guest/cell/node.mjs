// Runs cells of JavaScript, or of TypeScript with --typescript, in one persistent global scope. Builtin modules only.
//
// Descriptors: 3 has the requests, 4 and 5 are duplicates of stdout and stderr for frames. Node cannot duplicate a descriptor, so that the
// program that starts the runner has to pass them. Node marks all descriptors above 2 close-on-exec when it starts.
//
// How a cell runs: a cell is a sloppy script of the main context, in which top-level const, let and class become var, so that later cells
// may declare the same names again. V8 itself computes the value of the last expression. A cell with await or import becomes the body of an
// async arrow function, in which top-level declarations become assignments to globals. See rewrite.
import { lstatSync, readFileSync, readdirSync, writeSync } from "node:fs";
import module from "node:module";
import net from "node:net";
import path from "node:path";
import process from "node:process";
import { pathToFileURL } from "node:url";
import util from "node:util";
import vm from "node:vm";

const maxDisplays = 100;
const maxDisplayBytes = 4 << 20;
const maxValueBytes = 2 << 20;
const maxTracebackLines = 100;
const maxTracebackLine = 2000;
const maxErrorValue = 20000;
const maxFiles = 100;
const maxPart = 4000;

const requestsFd = 3;
const framesFd = 4;
const syncFd = 5;

// User code may replace methods of globals. What the runner needs in every cell is kept here.
const { stringify, parse } = JSON;
const { Buffer, Promise } = globalThis;
const { inspect } = util;
const { stdout, stderr } = process;

const typescript = process.argv.includes("--typescript");
if (typescript && !module.stripTypeScriptTypes) {
  writeSync(2, `TypeScript needs Node 22.13 or newer; this is ${process.versions.node}\n`);
  process.exit(64);
}
const nonce = process.env.BULLPEN_CELL;
delete process.env.BULLPEN_CELL;

// Frames.

let frames = 0;
const pause = new Int32Array(new SharedArrayBuffer(4));

function writeAll(fd, text) {
  for (let data = Buffer.from(text, "latin1"); data.length > 0; ) {
    try {
      data = data.subarray(writeSync(fd, data));
    } catch (error) {
      if (error.code !== "EAGAIN" && error.code !== "EINTR") throw error;
      Atomics.wait(pause, 0, 0, 2);
    }
  }
}

function writeChunks(fd, frame) {
  const json = stringify(frame).replace(/[\x7f-\uffff]/g, (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"));
  for (let at = 0; at < json.length; at += maxPart) {
    const more = at + maxPart < json.length ? 1 : 0;
    writeAll(fd, `\x1b_${nonce};${more};${json.slice(at, at + maxPart)}\x1b\\`);
  }
}

// writeFrame needs no flush: blockWrites makes the program's own writes synchronous.
function writeFrame(frame) {
  const sync = ++frames;
  writeChunks(syncFd, { sync });
  writeChunks(framesFd, { sync, ...frame });
}

// blockWrites makes writes to pipes wait for their reader. Node leaves pipes non-blocking and queues what does not fit, which would
// reorder output and frames, and lose output at process.exit.
function blockWrites(stream) {
  stream._handle?.setBlocking?.(true);
  // A cell may close a descriptor; later writes must not end the context.
  stream.on("error", () => {});
}

// resumeWrites ends a write that an interrupt cut off between its system call and its callback. Otherwise the stream would queue all later
// output. Writes block, so that none is in progress at any other time.
function resumeWrites() {
  for (const stream of [stdout, stderr]) {
    const state = stream._writableState;
    if (state?.writing) state.onwrite();
  }
}

// Displays.

let current = null; // the run in progress

const textTypes = /^text\/|^image\/svg\+xml$|^application\/(javascript|xml)$/;
const jsonTypes = /^application\/json$|\+json$/;

function isBytes(value) {
  return value instanceof Uint8Array || value instanceof ArrayBuffer;
}

// encodeValue returns the form of value in a frame: base64 for bytes, JSON for JSON types, else a string.
function encodeValue(mime, value) {
  if (isBytes(value)) return Buffer.from(value).toString(textTypes.test(mime) ? "utf8" : "base64");
  if (jsonTypes.test(mime)) return value;
  return String(value);
}

function imageType(bytes) {
  const start = Buffer.from(bytes).toString("latin1", 0, 8);
  if (start === "\x89PNG\r\n\x1a\n") return "image/png";
  if (start.startsWith("\xff\xd8\xff")) return "image/jpeg";
  return null;
}

// bundleOf returns a MIME bundle of value, or a promise of one.
function bundleOf(value) {
  if (value !== null && (typeof value === "object" || typeof value === "function")) {
    for (const method of [Symbol.for("Jupyter.display"), "toMimeBundle"]) {
      if (typeof value[method] === "function") return value[method]();
    }
    if (isBytes(value)) {
      const type = imageType(value);
      if (type) return { [type]: value };
    }
  }
  return { "text/plain": inspect(value) };
}

// cutText returns the longest prefix of text with at most max bytes of UTF-8 that ends at a character.
function cutText(text, max) {
  const bytes = Buffer.from(text);
  let end = max;
  while ((bytes[end] & 0xc0) === 0x80) end--;
  return bytes.toString("utf8", 0, end);
}

// writeDisplay writes a display of run. Output of timers after the end of their run belongs to the run in progress, if any.
function writeDisplay(run, bundle, result) {
  if (!run) return;
  if (run.displays === maxDisplays) {
    run.dropped++;
    return;
  }
  const data = {};
  const truncated = [];
  let bytes = 0;
  for (const [mime, raw] of Object.entries(bundle)) {
    if (raw === undefined) continue;
    let value = encodeValue(mime, raw);
    const text = typeof value === "string";
    const size = Buffer.byteLength(text ? value : (stringify(value) ?? ""));
    const room = Math.min(maxValueBytes, maxDisplayBytes - run.displayBytes - bytes);
    if (size > room) {
      truncated.push(mime);
      if (!text || !textTypes.test(mime) || room <= 0) continue;
      value = cutText(value, room);
    }
    bytes += Math.min(size, room);
    data[mime] = value;
  }
  run.displays++;
  run.displayBytes += bytes;
  const frame = { type: "display", run: run.id, data };
  if (result) frame.result = true;
  if (truncated.length > 0) frame.truncated = truncated;
  writeFrame(frame);
}

// display shows value as mime type, or as the types that it offers itself.
function display(value, mime) {
  const run = current;
  const bundle = mime === undefined ? bundleOf(value) : { [mime]: value };
  if (typeof bundle?.then === "function") return bundle.then((b) => writeDisplay(run === current ? run : null, b));
  writeDisplay(run, bundle);
}
for (const [name, mime] of Object.entries({
  html: "text/html",
  markdown: "text/markdown",
  json: "application/json",
  svg: "image/svg+xml",
  png: "image/png",
  jpeg: "image/jpeg",
})) {
  display[name] = (value) => display(value, mime);
}

// Errors.

const runnerLine = new RegExp(
  `^\\s+at .*(${import.meta.url.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}|node:vm:|node:internal/(vm|process|timers))`,
);

function errorText(error) {
  try {
    return inspect(error);
  } catch {
    return "an error that cannot be shown";
  }
}

function tracebackOf(error) {
  const lines = errorText(error)
    .split("\n")
    .filter((line) => !runnerLine.test(line));
  return lines.slice(0, maxTracebackLines).map((line) => line.slice(0, maxTracebackLine));
}

function writeError(run, error) {
  let name = "Error";
  let value;
  try {
    if (util.types.isNativeError(error) || error instanceof Error) {
      name = String(error.name);
      value = String(error.message);
    } else {
      name = error?.constructor?.name || "Error";
      value = inspect(error);
    }
  } catch {
    value = errorText(error);
  }
  writeFrame({ type: "error", run: run.id, name, value: value.slice(0, maxErrorValue), traceback: tracebackOf(error) });
}

// SyntaxErrors of V8 begin with the place, the line and a mark. userSyntaxError puts the user's line in place of the rewritten one.
function userSyntaxError(error, code) {
  const lines = String(error.stack).split("\n");
  const line = Number(lines[0].match(/^cell-\d+:(\d+)$/)?.[1]);
  const source = code.split("\n")[line - 1];
  if (source !== undefined) lines[1] = source;
  error.stack = lines.join("\n");
  return error;
}

// Rewriting of cells.

const regexKeywords = new Set("return typeof case in of delete void throw new instanceof do else await yield".split(" "));
const blockKeywords = new Set("function class if for while do try switch with {".split(" "));
const punctuators = /\.\.\.|=>|\?\.(?!\d)|\+\+|--|[-+*/%&|^<>=!~?:;,.(){}[\]@]/y;
const words = /[\p{ID_Start}$_#\\][\p{ID_Continue}$\u200c\u200d\\]*/uy;
const numbers = /\.?\d(?:[eE][-+]|[\w.])*/y;
const regexes = /\/(?:[^/\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+\/[\w$]*/y;
const spaces = /(?:\s|\/\/[^\n\r\u2028\u2029]*|\/\*[^]*?\*\/)+/y;

// scan splits code into tokens: type (word, number, string, template, regex, punctuator), text, start, end, depth (of brackets), newline
// (one precedes it), operand (an expression can end here). It understands as much of the language as the rewriting needs. What it does not
// understand it leaves to V8, whose syntax errors are the ones that are reported.
function scan(code) {
  const tokens = [];
  const brackets = [];
  let at = 0;
  let newline = false;
  const match = (pattern) => {
    pattern.lastIndex = at;
    return pattern.exec(code)?.[0];
  };
  const add = (type, text, operand, depth = brackets.length) => {
    tokens.push({ type, text, start: at, end: at + text.length, depth, newline, operand });
    at += text.length;
    newline = false;
  };
  // templatePart adds the text from at to the next substitution or to the end of the template.
  const templatePart = (depth) => {
    let end = at + 1;
    while (end < code.length && code[end] !== "`" && !(code[end] === "$" && code[end + 1] === "{")) end += code[end] === "\\" ? 2 : 1;
    const open = code[end] === "$";
    add("template", code.slice(at, end + (open ? 2 : 1)), !open, depth);
    if (open) brackets.push({ template: true });
  };
  while (at < code.length) {
    const space = match(spaces);
    if (space) {
      newline ||= /[\n\r\u2028\u2029]/.test(space);
      at += space.length;
      continue;
    }
    const before = tokens.at(-1);
    const c = code[at];
    let text;
    if (c === "`") {
      templatePart(brackets.length);
    } else if (c === "}" && brackets.at(-1)?.template) {
      brackets.pop();
      templatePart(brackets.length);
    } else if (c === '"' || c === "'") {
      let end = at + 1;
      while (end < code.length && code[end] !== c && code[end] !== "\n") end += code[end] === "\\" ? 2 : 1;
      add("string", code.slice(at, end + 1), true);
    } else if ((text = match(words))) {
      add("word", text, before?.text === "." || before?.text === "?." || !regexKeywords.has(text));
    } else if ((text = match(numbers))) {
      add("number", text, true);
    } else if (c === "/" && !before?.operand && (text = match(regexes))) {
      add("regex", text, true);
    } else if ((text = match(punctuators))) {
      if (text === "(" || text === "[" || text === "{") {
        // An expression follows the condition of a statement, and a block, but not a call or an object.
        const condition = text === "(" && /^(if|while|for|with)$/.test(before?.text);
        const block = text === "{" && (!before || before.text === ")" || before.text === ";" || before.text === "}" ||
          before.text === "=>" || /^(else|do|try|finally)$/.test(before.text) || before.operand);
        add("punctuator", text, false);
        brackets.push({ statement: condition || block });
      } else if (text === ")" || text === "]" || text === "}") {
        const bracket = brackets.pop();
        add("punctuator", text, !bracket?.statement);
      } else {
        add("punctuator", text, (text === "++" || text === "--") && Boolean(before?.operand));
      }
    } else {
      add("punctuator", c, false);
    }
  }
  return tokens;
}

// statements returns the top-level statements of tokens as [first token, last token] pairs of indexes. The rules of automatic semicolons:
// a new line ends a statement when the token before may end an expression and the next one cannot continue it.
function statements(tokens) {
  const list = [];
  let first = 0;
  for (let i = 1; i <= tokens.length; i++) {
    const before = tokens[i - 1];
    const next = tokens[i];
    if (next?.depth > 0 && !/^[([{]$/.test(next.text)) continue;
    if (next && before.depth > 0 && next.depth > 0) continue;
    const start = tokens[first].text === "async" && tokens[first + 1]?.text === "function" ? "function" : tokens[first].text;
    const closes = before.text === "}" && before.depth === 0;
    let ends = !next || (before.text === ";" && before.depth === 0);
    if (!ends && next.depth === 0 && before.depth === 0) {
      if (closes && blockKeywords.has(start)) {
        ends = !/^(else|catch|finally|while)$/.test(next.text) && !(start === "class" && !isBody(tokens, first, i - 1));
      } else if (next.newline && !/^(const|let|var|class|extends|function|import)$/.test(before.text) &&
        !(start === "import" && next.text === "from") && (before.operand || closes || /^(break|continue|return|debugger)$/.test(before.text))) {
        ends = /^(\+\+|--|[{!~@])$/.test(next.text) ||
          (next.type !== "punctuator" && next.type !== "template" && !/^(in|instanceof|of|as|from|with)$/.test(next.text));
      }
    }
    if (ends) {
      if (i > first) list.push([first, i - 1]);
      first = i;
    }
  }
  return list;
}

// isBody reports whether the brace that ends at index close is the body of the class declaration at index first.
function isBody(tokens, first, close) {
  return tokens.slice(first, close).some((t) => t.depth === 0 && t.text === "{");
}

// importCode returns the expression that does what an import declaration does.
function importCode(tokens) {
  const string = tokens.findIndex((t, i) => t.type === "string" && (i === 1 || tokens[i - 1].text === "from"));
  if (string < 0) return null;
  const attributes = tokens.slice(string + 1).filter((t) => t.text !== ";");
  const options = attributes.length > 1 ? `, {${attributes[0].text}: ${attributes.slice(1).map((t) => t.text).join("")}}` : "";
  const load = `await ${importName}(${tokens[string].text}${options})`;
  const names = [];
  let namespace = "";
  for (let i = 1; i < string - 1; i++) {
    const [text, next] = [tokens[i].text, tokens[i + 1].text];
    if (text === "{" || text === "}" || text === ",") continue;
    if (text === "*") {
      namespace = tokens[i + 2].text;
      i += 2;
    } else if (next === "as") {
      names.push(`${text}: ${tokens[i + 2].text}`);
      i += 2;
    } else {
      names.push(tokens[i].depth === 0 ? `default: ${text}` : text);
    }
  }
  const targets = names.length > 0 ? `{${names.join(", ")}} = ` : "";
  return `;(${targets}${namespace ? `${namespace} = ` : ""}${load});`;
}

// declarationInits returns edits that give undefined to the plain names of a let or var declaration that have no value. Without them a name
// would keep the value of an earlier cell.
function declarationInits(tokens) {
  const edits = [];
  for (let i = 1; i < tokens.length; i++) {
    const after = tokens[i + 1]?.text ?? ";";
    const separate = tokens[i - 1].depth === 0 && (i === 1 || tokens[i - 1].text === ",");
    if (tokens[i].depth === 0 && tokens[i].type === "word" && separate && (after === "," || after === ";")) {
      edits.push([tokens[i].end, tokens[i].end, " = undefined"]);
    }
  }
  return edits;
}

function apply(code, edits) {
  let out = "";
  let at = 0;
  for (const [start, end, text] of edits.sort((a, b) => a[0] - b[0] || a[1] - b[1])) {
    out += code.slice(at, start) + text;
    at = end;
  }
  return out + code.slice(at);
}

// rewrite returns how to make a script of a cell: edits, the header of an async cell, and the place of the last expression of one.
function rewrite(code) {
  const tokens = scan(code);
  const list = statements(tokens);
  const isImport = ([first]) => tokens[first].text === "import" && !/^[(.]$/.test(tokens[first + 1]?.text);
  const isAsync = tokens.some((t, i) => t.text === "await" && t.type === "word" && tokens[i - 1]?.text !== ".") || list.some(isImport);
  const edits = [];
  let hoisted = "";
  let value = null; // the last statement, if it may be an expression
  for (const [first, last] of list) {
    const token = tokens[first];
    const next = tokens[first + 1];
    const own = tokens.slice(first, last + 1);
    const end = tokens[last].text === ";" ? tokens[last].start : tokens[last].end;
    value = null;
    const declares = token.text === "const" || token.text === "var" ||
      (token.text === "let" && (next?.type === "word" ? !/^(in|instanceof|of)$/.test(next.text) : /^[[{]$/.test(next?.text)));
    if (declares) {
      if (token.text === "let") edits.push(...declarationInits(own));
      if (isAsync) {
        edits.push([token.start, token.end, ";(".padEnd(token.text.length)], [end, end, ");"]);
      } else {
        edits.push([token.start, token.end, "var".padEnd(token.text.length)]);
      }
    } else if (token.text === "class" && next?.type === "word") {
      edits.push([token.start, token.start, `${isAsync ? "" : "var "}${next.text} = `], [end, end, ";"]);
    } else if (isImport([first])) {
      const text = importCode(own);
      if (text) edits.push([token.start, end, text + "\n".repeat(code.slice(token.start, end).split("\n").length - 1)]);
    } else if (token.text === "function" || (token.text === "async" && next?.text === "function")) {
      const name = own.find((t, i) => i > 0 && t.type === "word" && t.text !== "function");
      if (isAsync && name) hoisted += `globalThis.${name.text} = ${name.text}; `;
    } else {
      value = { start: token.start, end };
    }
  }
  tokens.forEach((token, i) => {
    const isCall = token.text === "import" && tokens[i + 1]?.text === "(" && tokens[i - 1]?.text !== ".";
    if (isCall && importName !== "import") edits.push([token.start, token.end, importName]);
  });
  return isAsync ? { edits, header: `(async () => { ${hoisted}`, value } : { edits, header: "" };
}

// compile returns the vm.Script of a cell.
function compile(code, filename) {
  const { edits, header, value } = rewrite(code);
  const options = { filename, columnOffset: -header.length, importModuleDynamically };
  const script = (more) => new vm.Script(header + apply(code, [...edits, ...more]) + (header && "\n})()"), options);
  if (value) {
    try {
      return script([[value.start, value.start, "return ("], [value.end, value.end, "\n)"]]);
    } catch {
      // The last statement is no expression.
    }
  }
  return script([]);
}

// Cells import from the working directory. Node 18 has no constant for that: there, import becomes a function that resolves as require does.
const importModuleDynamically = vm.constants?.USE_MAIN_CONTEXT_DEFAULT_LOADER;
const importName = importModuleDynamically ? "import" : "__import";

function importAsRequire(name) {
  const resolved = module.isBuiltin(name) ? name : requireFrom(workingDirectory() ?? "/").resolve(name);
  return import(path.isAbsolute(resolved) ? pathToFileURL(resolved).href : resolved);
}

// stripTypes returns code without types. Enums and namespaces need the transformation, which moves columns.
function stripTypes(code) {
  try {
    return module.stripTypeScriptTypes(code);
  } catch (error) {
    if (error.code !== "ERR_UNSUPPORTED_TYPESCRIPT_SYNTAX") throw error;
    return module.stripTypeScriptTypes(code, { mode: "transform" });
  }
}

// The state of the process around a run.

function workingDirectory() {
  try {
    return process.cwd();
  } catch {
    return null; // it was deleted
  }
}

function requireFrom(directory) {
  return module.createRequire(path.join(directory, "cell.js"));
}

let requireDirectory = null;

// defineRequire makes require and __dirname those of the working directory, as long as the program has not replaced them.
function defineRequire(directory) {
  if (directory === null || directory === requireDirectory) return;
  requireDirectory = directory;
  const cell = new module.Module("cell");
  const require = requireFrom(directory);
  require.main = cell;
  Object.assign(globalThis, { require, module: cell, exports: cell.exports, __dirname: directory });
}

// listFiles returns the visible regular files of directory: name to size and time of change.
function listFiles(directory) {
  const files = new Map();
  let names = [];
  try {
    names = readdirSync(directory, "buffer");
  } catch {
    return files;
  }
  for (const name of names) {
    if (name[0] === 0x2e) continue;
    try {
      const stat = lstatSync(Buffer.concat([Buffer.from(directory + "/"), name]), { bigint: true });
      if (stat.isFile()) files.set(name.toString("latin1"), { path: name.toString(), size: Number(stat.size), time: stat.mtimeNs });
    } catch {
      // It was removed in between.
    }
  }
  return files;
}

function changedFiles(run) {
  const changed = [];
  if (run.directory === null) return changed;
  for (const [name, file] of listFiles(run.directory)) {
    const before = run.files.get(name);
    if (before?.size !== file.size || before?.time !== file.time) changed.push({ path: file.path, size: file.size });
  }
  return changed.slice(0, maxFiles);
}

function privateMemory() {
  try {
    const text = readFileSync("/proc/self/smaps_rollup", "latin1");
    let kilobytes = 0;
    for (const match of text.matchAll(/^Private_(?:Clean|Dirty): +(\d+) kB/gm)) kilobytes += Number(match[1]);
    return kilobytes * 1024;
  } catch {
    return undefined;
  }
}

// setEnv sets variables and returns what they were.
function setEnv(variables) {
  const former = {};
  for (const [name, value] of Object.entries(variables)) {
    former[name] = process.env[name];
    if (value === undefined) delete process.env[name];
    else process.env[name] = value;
  }
  return former;
}

// Runs.

const queue = [];
let count = 0;
let ended = false;

function startNext() {
  if (current) return;
  if (queue.length > 0) {
    startRun(queue.shift());
  } else if (ended) {
    process.exit();
  }
}

function startRun(request) {
  const directory = workingDirectory();
  const run = { id: request.run, displays: 0, displayBytes: 0, dropped: 0, directory, files: listFiles(directory) };
  current = run;
  run.env = setEnv(request.env ?? {});
  defineRequire(directory);
  // The program may have removed the listener, and without one the signal ends the process.
  process.off("SIGINT", interrupt);
  process.on("SIGINT", interrupt);
  const filename = `cell-${++count}`;
  let value;
  try {
    let script;
    try {
      const code = typescript ? stripTypes(request.code) : request.code;
      script = compile(code, filename);
    } catch (error) {
      throw userSyntaxError(error, request.code);
    }
    value = script.runInThisContext({ breakOnSigint: true, displayErrors: false });
  } catch (error) {
    resumeWrites();
    finish(run, error?.code === "ERR_SCRIPT_EXECUTION_INTERRUPTED" ? "interrupted" : "error", error);
    return;
  }
  // The value of an expression that is a promise is what the promise brings: main() as the last line waits for main.
  if (util.types.isPromise(value)) {
    Promise.prototype.then.call(value, (v) => showResult(run, v), (error) => finish(run, "error", error));
  } else {
    showResult(run, value);
  }
}

function showResult(run, value) {
  if (run !== current) return;
  try {
    if (value !== undefined) {
      const bundle = bundleOf(value);
      if (typeof bundle?.then === "function") {
        bundle.then((b) => {
          if (run !== current) return;
          writeDisplay(run, b, true);
          finish(run, "ok");
        }, (error) => finish(run, "error", error));
        return;
      }
      writeDisplay(run, bundle, true);
    }
  } catch (error) {
    finish(run, "error", error);
    return;
  }
  finish(run, "ok");
}

function interrupt() {
  if (current) finish(current, "interrupted");
}

function finish(run, status, error) {
  if (run !== current) return;
  if (status === "interrupted") {
    writeFrame({ type: "error", run: run.id, name: "Interrupted", value: "", traceback: ["Interrupted"] });
  } else if (status === "error") {
    writeError(run, error);
  }
  setEnv(run.env);
  const frame = { type: "end", run: run.id, status, count, memory: privateMemory(), files: changedFiles(run) };
  if (run.dropped > 0) frame.dropped = run.dropped;
  writeFrame(frame);
  current = null;
  setImmediate(startNext);
}

// An error outside of the cell's own flow goes to stderr, and neither ends the context nor the cell. A program with a listener of its own
// handles it itself.
function reportUncaught(event) {
  const report = (error) => {
    if (process.listenerCount(event) > 1) return;
    stderr.write(`Uncaught ${tracebackOf(error).join("\n")}\n`);
  };
  process.on(event, report);
}

// withoutWarnings calls first uses of experimental functions, which would each warn in stderr.
async function withoutWarnings(use) {
  const { emitWarning } = process;
  process.emitWarning = () => {};
  await use();
  process.emitWarning = emitWarning;
}

async function main() {
  blockWrites(stdout);
  blockWrites(stderr);
  reportUncaught("uncaughtException");
  reportUncaught("unhandledRejection");
  Object.defineProperty(globalThis, "display", { value: display, writable: true, configurable: true });
  if (!importModuleDynamically) Object.defineProperty(globalThis, importName, { value: importAsRequire });
  await withoutWarnings(async () => {
    await compile('await import("node:fs")', "cell-0").runInThisContext();
    if (typescript) module.stripTypeScriptTypes("");
  });
  process.on("SIGINT", interrupt);
  let pending = "";
  const requests = new net.Socket({ fd: requestsFd, readable: true, writable: false });
  requests.setEncoding("utf8");
  requests.on("data", (data) => {
    const lines = (pending + data).split("\n");
    pending = lines.pop();
    for (const line of lines) queue.push(parse(line));
    setImmediate(startNext);
  });
  requests.on("end", () => {
    ended = true;
    setImmediate(startNext);
  });
  writeFrame({ type: "ready", version: process.versions.node, name: "Node.js" });
}

await main();
