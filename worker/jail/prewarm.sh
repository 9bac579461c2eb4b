# Waits on descriptor 3 for the script's settings and then for the byte wire.Begin, see
# wire.PrewarmFD, and exits if they do not come whole. After a failed expansion, such as of ${X:?},
# bash would go on to the script: there is none here. Removes every trace of itself, except what
# declare -p shows of variables that bash creates on first use.
REPLY=$_
printf . >&3
IFS= read -r -d '' -u 3 BASH_ENV && [[ $BASH_ENV ]] && cd -- "$BASH_ENV" && IFS= read -r -d '' -u 3 BASH_ENV || exit
[[ $BASH_ENV = /dev/null ]] || exec <"$BASH_ENV" || exit
while IFS= read -r -d '' -u 3 BASH_ENV || exit; [[ $BASH_ENV ]]; do export -- "$BASH_ENV"; done
IFS= read -r -N 1 -u 3 BASH_ENV && [[ $BASH_ENV = N ]] || exit
exec 3>&-
unset -v BASH_ENV OLDPWD
declare -x OLDPWD
SECONDS=0
# The last word of this command becomes $_.
eval 'unset -v REPLY #' "$REPLY"
