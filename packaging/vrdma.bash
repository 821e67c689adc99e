# bash completion for vrdma(1)

_vrdma() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} subcommand= word i
    for ((i = 1; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        if [[ $word == run || $word == show || $word == doctor || $word == metrics ]]; then
            subcommand=$word
            break
        fi
    done
    if [[ $subcommand == run ]]; then
        # After the command's name, its own completion goes on.
        for ((i++; i < COMP_CWORD; i++)); do
            case ${COMP_WORDS[i]} in
                --link-layer | --name) ((i++)) ;;
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
        --socket | -s) COMPREPLY=($(compgen -f -- "$current")); return ;;
        --link-layer) COMPREPLY=($(compgen -W "ib ethernet" -- "$current")); return ;;
        --name) return ;;
    esac
    case $subcommand in
        "") COMPREPLY=($(compgen -W "run show doctor metrics --help --version" -- "$current")) ;;
        run)
            if [[ $current == -* ]]; then
                COMPREPLY=($(compgen -W "--link-layer --name --stats --help --" -- "$current"))
            else
                COMPREPLY=($(compgen -c -- "$current"))
            fi
            ;;
        show) COMPREPLY=($(compgen -W "devices guests qps cqs mrs srqs routes cache counters --json --socket --help" -- "$current")) ;;
        doctor) COMPREPLY=($(compgen -W "--json --socket --help" -- "$current")) ;;
        metrics) COMPREPLY=($(compgen -W "--socket --help" -- "$current")) ;;
    esac
}
complete -F _vrdma vrdma
