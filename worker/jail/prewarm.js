// Waits on descriptor 3 for the program, see wire.PrewarmFD, and removes every trace of itself. Exits
// if the order does not come whole.
// Worker threads of the program require it again.
'use strict';
delete require.cache[__filename];
if (process.env.BULLPEN_PREWARM) {
  const fs = require('fs');
  fs.writeSync(3, '.');
  const part = Buffer.allocUnsafeSlow(65536);
  let order = Buffer.alloc(0);
  const read = () => {
    const n = fs.readSync(3, part, 0, part.length, null);
    if (n === 0) process.reallyExit(1);
    order = Buffer.concat([order, part.subarray(0, n)]);
  };
  let end;
  while ((end = order.indexOf('\0\0')) < 0) read();
  const [dir, stdin, ...added] = order.toString('utf8', 0, end).split('\0');
  process.chdir(dir);
  if (stdin !== '/dev/null') {
    fs.closeSync(0);
    fs.openSync(stdin); // opened as 0, the lowest free descriptor
  }
  const env = Object.entries(process.env);
  for (const [name] of env) delete process.env[name];
  for (const entry of added) env.push([entry.slice(0, entry.indexOf('=')), entry.slice(entry.indexOf('=') + 1)]);
  // In the order in which a program receives its environment.
  for (const [name, value] of env.sort(([a], [b]) => (a < b ? -1 : 1))) {
    if (name !== 'BULLPEN_PREWARM' && name !== 'NODE_OPTIONS') process.env[name] = value;
  }
  if (order.length === end + 2) read();
  if (order.toString('latin1', end + 2) !== 'N') process.reallyExit(1); // no code of the program may run before it
  fs.closeSync(3);
}
