# D3 for the page of `shardwright report`: JavaScript files that are put into the program.
find_path(SHARDWRIGHT_D3 d3-zoom/dist/d3-zoom.min.js PATHS /usr/share/nodejs NO_DEFAULT_PATH NO_CMAKE_FIND_ROOT_PATH
  DOC "Folder of D3's modules, as Debian's package node-d3 installs them")
if(NOT SHARDWRIGHT_D3)
  message(FATAL_ERROR "D3 is missing: install Debian's package node-d3 (scripts/install-deps.sh does), or set "
    "SHARDWRIGHT_D3 to the folder that holds d3-zoom/dist/d3-zoom.min.js and its sisters")
endif()
