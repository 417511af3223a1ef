# What `shardwright report` writes. D3 comes from Debian's package as it is, each module after those it needs.
function(sw_embed_report target)
  sw_embed(${target} report_page FOLDER analysis
    FILES
      report/page/page.html
      report/page/style.css
      report/page/d3_license.txt
  )
  set(d3_scripts)
  foreach(module IN ITEMS array path shape color interpolate format time time-format scale dispatch selection drag timer ease
          transition zoom axis)
    list(APPEND d3_scripts "${SHARDWRIGHT_D3}/d3-${module}/dist/d3-${module}.min.js")
  endforeach()
  sw_embed(${target} report_scripts FOLDER analysis
    FILES
      ${d3_scripts}
      report/page/units.js
      report/page/tables.js
      report/page/spans.js
      report/page/timeline.js
      report/page/memory.js
      report/page/choices.js
      report/page/controls.js
      report/page/plan_picture.js
      report/page/figures.js
      report/page/report.js
  )
endfunction()
