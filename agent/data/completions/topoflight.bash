# bash completion, by click itself; from <prefix>/share/bash-completion/completions/topoflight it is loaded when needed
eval "$(_TOPOFLIGHT_COMPLETE=bash_source topoflight)"
