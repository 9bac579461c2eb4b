# Runs cells of bash in one interactive shell. An error that ends a script (an unset variable with set -u, a bad expansion) and SIGINT return
# an interactive shell to its reader of commands, and that reader is the loop of this runner. Start it as `bash bash.sh`, as the leader of
# a session.
#
# A request is two lines of shell. The second one runs however the first one ends:
#
#   { __bullpen_begin RUN CODE [NAME=VALUE]...; } 2>/dev/null; \builtin source /dev/fd/250 250<<<"$__bullpen_code" </dev/null; \
#     { __bullpen_source_ended $?; } 2>/dev/null
#   { __bullpen_end $?; } 2>/dev/null
#
# (The first line is shown here as two.) In contrast to eval, source makes messages about jobs and the terminal those of a script.
# Its words are quoted as $'…', with every byte that is not printable ASCII, and \ and ', as \xHH (HH: two hex digits). So the shell itself
# decodes them. They cannot contain NUL.

if [[ $- != *i* ]]; then
  # An interactive shell without a terminal complains about job control before it reads anything.
  exec bash --noediting --rcfile "${BASH_SOURCE[0]}" -i 3>&2 2>/dev/null
fi
exec {__bullpen_frames}>&1 2>&3 {__bullpen_sync}>&3 3>&-
set +o history +o histexpand
PS1='' PS2=''
unset HISTFILE MAILCHECK
# An interactive shell ignores SIGTERM. Interrupts are ignored while no cell runs.
trap 'exit 143' TERM
trap '' INT

__bullpen_max_displays=100
__bullpen_max_display_bytes=$((4 << 20))
__bullpen_max_value_bytes=$((2 << 20))
__bullpen_max_files=100

__bullpen_nonce=$BULLPEN_CELL
unset BULLPEN_CELL
__bullpen_sequence=0
__bullpen_count=0
__bullpen_run=
__bullpen_directory=
__bullpen_changed=()
__bullpen_find=$(type -P find)

# __bullpen_write FD PART... writes the chunks of a frame. A part has at most 4,000 bytes.
__bullpen_write() {
  builtin local fd="$1"
  builtin shift
  while (($# > 1)); do
    builtin printf '\e_%s;1;%s\e\\' "$__bullpen_nonce" "$1" >&"$fd"
    builtin shift
  done
  builtin printf '\e_%s;0;%s\e\\' "$__bullpen_nonce" "$1" >&"$fd"
}

# __bullpen_frame PART... writes a frame. The sync is added at its beginning, and the closing brace at its end.
__bullpen_frame() {
  builtin local sync=$((++__bullpen_sequence))
  __bullpen_write "$__bullpen_sync" "{\"sync\":$sync}"
  __bullpen_write "$__bullpen_frames" "{\"sync\":$sync,${1#\{}" "${@:2}" "}"
}

# __bullpen_escape TEXT sets REPLY to TEXT as the inside of a JSON string, in ASCII.
__bullpen_escape() {
  builtin local LC_ALL=C.UTF-8 rest="$1" plain c code
  rest=${rest//\\/\\\\}
  rest=${rest//\"/\\\"}
  rest=${rest//$'\n'/\\n}
  REPLY=
  while [[ $rest ]]; do
    plain=${rest%%[!\ -\~]*}
    REPLY+=$plain
    rest=${rest:${#plain}}
    [[ $rest ]] || break
    c=${rest:0:1}
    rest=${rest:1}
    builtin printf -v code %d "'$c"
    # A byte that is not UTF-8 has no code point: printf takes it as one below 256, whose own encoding differs.
    builtin printf -v plain '\\U%08x' "$((code & 0x1fffff))"
    builtin printf -v plain %b "$plain"
    [[ $plain == "$c" ]] || code=0xfffd
    if ((code > 0xffff)); then
      builtin printf -v c '\\u%04x\\u%04x' $((0xd800 + (code - 0x10000 >> 10))) $((0xdc00 + (code & 0x3ff)))
    else
      builtin printf -v c '\\u%04x' "$((code))"
    fi
    REPLY+=$c
  done
}

# __bullpen_list fills __bullpen_changed with size, time of change and name of the visible regular files in __bullpen_directory that changed
# since __bullpen_start. A slash ends each, because no name contains one. A process substitution would change $!.
__bullpen_list() {
  builtin local - IFS=/
  builtin set -f
  __bullpen_changed=($("$__bullpen_find" "$__bullpen_directory/" -maxdepth 1 -type f ! -name '.*' \
    -newerct "@$__bullpen_start" -printf '%s %C@ %f/'))
}

__bullpen_begin() {
  __bullpen_run=$1 __bullpen_code=$2 __bullpen_status= __bullpen_errexit= __bullpen_displays=0 __bullpen_bytes=0 __bullpen_dropped=0
  __bullpen_restore=()
  builtin shift 2
  builtin local pair saved
  for pair; do
    saved=$(builtin declare -p "${pair%%=*}")
    __bullpen_restore+=("${saved/#declare/declare -g}" "${pair%%=*}")
    builtin export "$pair" 2>&"$__bullpen_sync" || builtin :
  done
  # The clock of file systems is up to 10 ms late. What changed just before is left out by its time of change.
  saved=$((${EPOCHREALTIME/[.,]/} - 20000))
  __bullpen_start=${saved:0:-6}.${saved: -6}
  if [[ $__bullpen_directory != "$PWD" ]]; then
    __bullpen_directory=$PWD
    __bullpen_list
  fi
  ((++__bullpen_count))
  # With set -e a failing command ends the cell, not the shell.
  builtin set -E
  builtin trap '__bullpen_failed $?' ERR
  builtin trap - INT
}

# __bullpen_source_ended is not called after a cell that was cut off.
__bullpen_source_ended() {
  __bullpen_status=$1
  # A sourced .bashrc sets prompts.
  PS1='' PS2='' PROMPT_COMMAND=
}

__bullpen_failed() {
  if [[ $- == *e* && $BASHPID == "$$" ]]; then
    __bullpen_errexit=$1
    # An interrupt returns the shell to its reader of commands. It writes an empty line to stderr.
    { builtin kill -INT $$; } 2>/dev/null
  fi
}

__bullpen_end() {
  builtin trap '' INT
  builtin trap - ERR
  builtin local - IFS=$' \t\n' status="$1" result=ok name=ExitStatus
  builtin set +euxf
  if [[ $__bullpen_status ]]; then
    status=$__bullpen_status
  elif [[ $__bullpen_errexit ]]; then
    status=$__bullpen_errexit
  elif ((status == 130)); then
    result=interrupted name=KeyboardInterrupt
  fi
  if [[ $result == interrupted ]]; then
    __bullpen_frame "{\"type\":\"error\",\"run\":$__bullpen_run,\"name\":\"KeyboardInterrupt\",\"value\":\"\",\"traceback\":[]"
  elif ((status != 0)); then
    result=error
    __bullpen_frame "{\"type\":\"error\",\"run\":$__bullpen_run,\"name\":\"ExitStatus\",\"value\":\"$status\",\"traceback\":[]"
  fi

  builtin local i
  for ((i = 0; i < ${#__bullpen_restore[@]}; i += 2)); do
    builtin unset -v "${__bullpen_restore[i + 1]}"
    builtin eval "${__bullpen_restore[i]}"
  done

  builtin local entry files='' count=0 size key value rest memory=0
  builtin local -a parts
  builtin local -A before
  for entry in "${__bullpen_changed[@]}"; do before[$entry]=1; done
  __bullpen_list
  parts=("{\"type\":\"end\",\"run\":$__bullpen_run,\"status\":\"$result\",\"count\":$__bullpen_count")
  while builtin read -r key value rest; do
    [[ $key == Private_Clean: || $key == Private_Dirty: ]] && ((memory += value * 1024))
  done </proc/$$/smaps_rollup
  ((memory > 0)) && parts+=(",\"memory\":$memory")
  parts+=(',"files":[')
  for entry in "${__bullpen_changed[@]}"; do
    [[ ${before[$entry]-} ]] && continue
    ((++count > __bullpen_max_files)) && break
    size=${entry%% *}
    entry=${entry#* }
    __bullpen_escape "${entry#* }"
    parts+=("$files{\"path\":\"$REPLY\",\"size\":$size}")
    files=,
  done
  parts+=(']')
  ((__bullpen_dropped > 0)) && parts+=(",\"dropped\":$__bullpen_dropped")
  __bullpen_frame "${parts[@]}"
  __bullpen_run=
  builtin return 0
}

# display MIME FILE shows a file.
display() {
  builtin local - IFS=$' \t\n' LC_ALL=C mime="${1-}" file="${2-}" size room truncated='' part REPLY
  builtin set +euxf
  if [[ ! $mime =~ ^[a-z]+/[a-zA-Z0-9.+-]+$ || ! -r $file || $mime == */json || $mime == *+json ]]; then
    builtin echo 'usage: display MIME FILE (not for JSON)' >&2
    builtin return 2
  fi
  # The counters of a subshell would be lost.
  if [[ $BASHPID != "$$" || ! $__bullpen_run ]]; then
    builtin echo 'display: only in the shell of the cell' >&2
    builtin return 1
  fi
  if ((__bullpen_displays == __bullpen_max_displays)); then
    ((++__bullpen_dropped))
    builtin return 0
  fi
  ((++__bullpen_displays))
  ((room = __bullpen_max_display_bytes - __bullpen_bytes))
  ((room > __bullpen_max_value_bytes)) && room=$__bullpen_max_value_bytes
  builtin local -a parts
  if [[ $mime == text/* || $mime == image/svg+xml ]]; then
    size=0
    while LC_ALL=C.UTF-8 builtin read -r -d '' -N 300 part || [[ $part ]]; do
      ((size + ${#part} > room)) && truncated=",\"truncated\":[\"$mime\"]" && break
      ((size += ${#part}))
      __bullpen_escape "$part"
      parts+=("$REPLY")
    done <"$file"
    parts=(",\"data\":{\"$mime\":\"" "${parts[@]}" '"}')
  else
    size=$((($(command wc -c <"$file") + 2) / 3 * 4))
    if ((size > room)); then
      size=0
      parts=(',"data":{}')
      truncated=",\"truncated\":[\"$mime\"]"
    else
      parts=(",\"data\":{\"$mime\":\"" $(command base64 -w 4000 "$file") '"}')
    fi
  fi
  ((__bullpen_bytes += size))
  __bullpen_frame "{\"type\":\"display\",\"run\":$__bullpen_run" "${parts[@]}" "$truncated"
  builtin return 0
}

__bullpen_frame "{\"type\":\"ready\",\"version\":\"$BASH_VERSION\",\"name\":\"GNU bash\""
