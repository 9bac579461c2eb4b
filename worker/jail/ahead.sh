# Waits on descriptor 3 for what the script has to find, and for the end of the stream, as wire.AheadFD says, and
# leaves nothing of itself, but for what declare -p tells of variables that bash
# makes when they are used.
REPLY=$_
printf . >&3
IFS= read -r -d '' -u 3 BASH_ENV
cd -- "$BASH_ENV"
IFS= read -r -d '' -u 3 BASH_ENV
[[ $BASH_ENV = /dev/null ]] || exec <"$BASH_ENV"
while IFS= read -r -d '' -u 3 BASH_ENV && [[ $BASH_ENV ]]; do export -- "$BASH_ENV"; done
IFS= read -r -u 3 BASH_ENV
exec 3>&-
unset -v BASH_ENV OLDPWD
declare -x OLDPWD
SECONDS=0
# Its last word is what $_ is from now on.
eval 'unset -v REPLY #' "$REPLY"
