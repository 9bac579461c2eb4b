# Waits on descriptor 3 for the script's settings and then for the end of the stream, see
# wire.PrewarmFD. Removes every trace of itself, except what declare -p shows of variables that bash
# creates on first use.
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
# The last word of this command becomes $_.
eval 'unset -v REPLY #' "$REPLY"
