//! The cases of all examples, run natively.

use sapwood_guest::testing::{Case, Run, Scenario};

/// The examples as modules of this test: a module for WebAssembly is no library that could be linked.
macro_rules! examples {
    ($($name:literal: $module:ident::$controller:ident in $path:literal;)*) => {
        $(#[path = $path] mod $module;)*

        /// Runs a controller by its name.
        fn run(name: &str, scenario: &Scenario) -> Option<Run> {
            match name {
                $($name => Some(scenario.run::<$module::$controller>()),)*
                _ => None,
            }
        }

        const NAMES: &[&str] = &[$($name),*];
    };
}

examples! {
    "best-of-n": best_of_n::BestOfN in "../../best-of-n/src/lib.rs";
    "choice": choice::Choice in "../../choice/src/lib.rs";
    "except": except::Except in "../../except/src/lib.rs";
    "json-object": json_object::JsonObject in "../../json-object/src/lib.rs";
    "list-of-five": list_of_five::ListOfFive in "../../list-of-five/src/lib.rs";
    "quote": quote::Quote in "../../quote/src/lib.rs";
    "rewrite": rewrite::Rewrite in "../../rewrite/src/lib.rs";
    "uppercase": uppercase::Uppercase in "../../uppercase/src/lib.rs";
    "yes": yes::Yes in "../../yes/src/lib.rs";
    "yesno": yesno::YesNo in "../../yesno/src/lib.rs";
}

#[test]
fn examples_do_what_their_cases_say() {
    let cases = Case::read(include_str!("../cases.json")).unwrap();
    for name in NAMES {
        assert!(
            cases.iter().any(|case| case.controller == *name),
            "{name} has no case"
        );
    }
    let failures: Vec<String> = cases
        .iter()
        .filter_map(|case| {
            case.check(&run(&case.controller, &case.scenario).unwrap())
                .err()
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}
