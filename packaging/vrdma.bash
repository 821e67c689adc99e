# bash completion for vrdma(1)

# Names of files, which are written as such: a folder's ends in a slash, blanks are quoted.
_vrdma_files() {
    compopt -o filenames 2>/dev/null
    mapfile -t COMPREPLY < <(compgen "$1" -- "$2")
}

_vrdma() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} subcommand= word i
    # "--link-layer=e" is three words to bash.
    if [[ $current == = ]]; then
        current=
    elif [[ $previous == = ]]; then
        previous=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word == run || $word == container || $word == show || $word == direct || $word == doctor || $word == metrics || $word == bench || $word == vm || $word == host ]]; then
            subcommand=$word
            break
        fi
    done
    if [[ $subcommand == run ]]; then
        # After the command's name, its own completion goes on.
        for ((i++; i < COMP_CWORD; i++)); do
            case ${COMP_WORDS[i]} in
                --link-layer | --name) [[ ${COMP_WORDS[i + 1]} != = ]] || ((i++)); ((i++)) ;;
                --) ((i++)); break ;;
                -*) ;;
                *) break ;;
            esac
        done
        if ((i < COMP_CWORD)) && declare -F _command_offset >/dev/null; then
            _command_offset "$i"
            return
        fi
    fi
    case $previous in
        --socket | -s | --output | -o) _vrdma_files -f "$current"; return ;;
        --mode) COMPREPLY=($(compgen -W "direct mediated direct,mediated hosts vm" -- "$current")); return ;;
        --vm-folder | --folder) _vrdma_files -d "$current"; return ;;
        --ram) _vrdma_files -f "$current"; return ;;
        --format) COMPREPLY=($(compgen -W "options nspawn cdi" -- "$current")); return ;;
        --link-layer) COMPREPLY=($(compgen -W "ib infiniband ethernet" -- "$current")); return ;;
        --name | --memory | --bar | --tenant | --address | --days | --only | --seconds | --repetitions | --tolerance) return ;;
        --guest | -g)
            COMPREPLY=($(compgen -W "$("${COMP_WORDS[0]}" show guests 2>/dev/null | sed -n 's/^link .* guest \([0-9]*\) .*/\1/p')" -- "$current"))
            return
            ;;
    esac
    case $subcommand in
        "") COMPREPLY=($(compgen -W "run container show direct doctor metrics bench vm host --help --version" -- "$current")) ;;
        run)
            if [[ $current == -* ]]; then
                COMPREPLY=($(compgen -W "--link-layer --name --mediated --stats --help --" -- "$current"))
            else
                # Programs, and folders on the way to one: no keywords, functions and builtins of the shell, which are none.
                COMPREPLY=($(compgen -c -- "$current" | sort -u | while read -r word; do [[ $word != */* ]] && ! type -P -- "$word" >/dev/null || echo "$word"; done))
            fi
            ;;
        container) COMPREPLY=($(compgen -W "--format --link-layer --name --socket --help" -- "$current")) ;;
        show) COMPREPLY=($(compgen -W "devices guests qps cqs mrs srqs cm_ids routes hosts hca cache counters --json --socket --help" -- "$current")) ;;
        direct)
            word="auto mediated "
            [[ ! " ${COMP_WORDS[*]:i + 1:COMP_CWORD - i - 1} " =~ \ (auto|mediated)\  ]] || word=
            COMPREPLY=($(compgen -W "$word--guest --socket --help" -- "$current"))
            ;;
        doctor) COMPREPLY=($(compgen -W "--json --socket --folder --help" -- "$current")) ;;
        host)
            word=${COMP_WORDS[i + 1]}
            if ((COMP_CWORD == i + 1)); then
                COMPREPLY=($(compgen -W "init add join list show remove partition --help" -- "$current"))
            elif [[ $word == partition && $COMP_CWORD -eq $((i + 2)) ]]; then
                COMPREPLY=($(compgen -W "add remove list --help" -- "$current"))
            elif [[ $current == -* ]]; then
                local options="--folder --help"
                [[ $word != list && $word != show && $word != partition ]] || options+=" --json"
                [[ $word != init && $word != add && $word != join && $word != remove && $word != partition ]] || options+=" --address"
                [[ $word != init && $word != add ]] || options+=" --days"
                [[ $word != add ]] || options+=" --output"
                COMPREPLY=($(compgen -W "$options" -- "$current"))
            elif [[ $word == join ]]; then
                _vrdma_files -f "$current"
            fi
            ;;
        vm)
            word=${COMP_WORDS[i + 1]}
            if ((COMP_CWORD == i + 1)); then
                COMPREPLY=($(compgen -W "add list show uml remove --help" -- "$current"))
            elif [[ $current == -* ]]; then
                local options="--socket --vm-folder --help"
                [[ $word == remove || $word == uml ]] || options+=" --json"
                [[ $word != add ]] || options+=" --memory --ram --private-ram --bar --tenant --plain --uml"
                COMPREPLY=($(compgen -W "$options" -- "$current"))
            elif [[ $word == show || $word == uml || $word == remove ]]; then
                COMPREPLY=($(compgen -W "$("${COMP_WORDS[0]}" vm list 2>/dev/null | sed -n 's/^vm \([^ ]*\) .*/\1/p')" -- "$current"))
            fi
            ;;
        bench)
            if [[ ${COMP_WORDS[i + 1]} != compare || COMP_CWORD -eq $((i + 1)) ]]; then
                COMPREPLY=($(compgen -W "compare --quick --only --list --mode --seconds --repetitions --output --no-peers --help" -- "$current"))
            elif [[ $current == -* ]]; then
                COMPREPLY=($(compgen -W "--tolerance --relative --all --help" -- "$current"))
            else
                _vrdma_files -f "$current"
            fi
            ;;
        metrics) COMPREPLY=($(compgen -W "--socket --help" -- "$current")) ;;
    esac
}
complete -F _vrdma vrdma
