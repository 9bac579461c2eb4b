// Waits on descriptor 3 for the program, see wire.PrewarmFD, and removes every trace of itself.
// Worker threads of the program require it again.
'use strict';
delete require.cache[__filename];
if (process.env.BULLPEN_PREWARM) {
  const fs = require('fs');
  fs.writeSync(3, '.');
  const part = Buffer.allocUnsafeSlow(65536);
  let settings = Buffer.alloc(0);
  while (!settings.toString('latin1').endsWith('\0\0')) {
    const n = fs.readSync(3, part, 0, part.length, null);
    if (n === 0) process.reallyExit(1);
    settings = Buffer.concat([settings, part.subarray(0, n)]);
  }
  const [dir, stdin, ...added] = settings.toString().split('\0').slice(0, -2);
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
  fs.readSync(3, part, 0, 1, null); // end of the stream: no code of the program may run before it
  fs.closeSync(3);
}
