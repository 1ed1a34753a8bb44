"""`fastrl report`: one page that opens offline, and its JSON twin.

In the order in which a page comes about:

    read        what kind of folder a RUN is; its files, also those that are being written
    run_folder  a folder of `fastrl train`       }  both become the same dictionary of
    comparison  a folder of `fastrl compare`     }  settings, rows and results
    figures, tables, reliability, groups         what is drawn, printed and shown, as data
    twin        all of it: the JSON twin, from which alone the page is made
    draw        one figure as SVG that follows the page's light and dark
    render      the twin through the templates
    live        again, when a file has changed
"""
