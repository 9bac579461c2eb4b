// Waits on descriptor 3 for what the program has to find, as wire.AheadFD says, and
// leaves nothing of itself. Threads of the program require it again.
'use strict';
delete require.cache[__filename];
if (process.env.BULLPEN_AHEAD) {
  const fs = require('fs');
  fs.writeSync(3, '.');
  const part = Buffer.allocUnsafeSlow(65536);
  let told = Buffer.alloc(0);
  while (!told.toString('latin1').endsWith('\0\0')) {
    const n = fs.readSync(3, part, 0, part.length, null);
    if (n === 0) process.reallyExit(1);
    told = Buffer.concat([told, part.subarray(0, n)]);
  }
  const [dir, stdin, ...added] = told.toString().split('\0').slice(0, -2);
  process.chdir(dir);
  if (stdin !== '/dev/null') {
    fs.closeSync(0);
    fs.openSync(stdin); // as 0, the lowest that is free
  }
  const env = Object.entries(process.env);
  for (const [name] of env) delete process.env[name];
  for (const entry of added) env.push([entry.slice(0, entry.indexOf('=')), entry.slice(entry.indexOf('=') + 1)]);
  // In the order in which the environment of a program is handed to it.
  for (const [name, value] of env.sort(([a], [b]) => (a < b ? -1 : 1))) {
    if (name !== 'BULLPEN_AHEAD' && name !== 'NODE_OPTIONS') process.env[name] = value;
  }
  fs.readSync(3, part, 0, 1, null); // to the end of the stream: until then nothing of the program may run
  fs.closeSync(3);
}
