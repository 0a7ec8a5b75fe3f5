_TOPOFLIGHT_COMPLETE=fish_source topoflight | source
