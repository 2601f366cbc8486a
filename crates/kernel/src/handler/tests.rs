//! Tests of functions from plain code.

use std::collections::HashMap;

use futures::executor::block_on;

use super::*;
use crate::args;
use crate::from_chunks::Json;
use crate::into_chunks::StreamOf;
use crate::kernel::Kernel;
use crate::probe::whole;

#[derive(serde::Deserialize, JsonSchema)]
struct Add {
    /// The first summand.
    a: i64,
    #[serde(default)]
    b: i64,
}

#[test]
fn ke_213_the_spec_is_derived_from_the_types() {
    let fun = function("calc.add", "Adds.", |add: Add| async move { add.a + add.b });
    let spec = fun.spec();
    let inputs: Vec<_> = spec
        .inputs
        .iter()
        .map(|input| (input.name.as_str(), input.required))
        .collect();
    assert_eq!(inputs, [("a", true), ("b", false)]);
    assert_eq!(
        spec.inputs[0]
            .schema
            .get("description")
            .and_then(Value::as_str),
        Some("The first summand.")
    );
    assert_eq!(spec.outputs[0].mimes, [Mime::JSON]);
    let kernel = Kernel::new();
    kernel.add(fun).unwrap();
    assert_eq!(
        block_on(
            kernel
                .run::<Json<i64>>("calc.add", args! { a: 40, b: 2 })
                .one()
        )
        .unwrap(),
        Json(42)
    );
    assert_eq!(
        whole(kernel.run::<String>("calc.add", args! { a: 1 })).unwrap(),
        "1"
    );
}

#[test]
fn ke_213_arguments_that_are_no_object_are_refused_at_registration() {
    let kernel = Kernel::new();
    for bad in [
        function("f", "", |_: i64| async {}),
        function("f", "", |_: Vec<u8>| async {}),
    ] {
        assert!(matches!(kernel.add(bad), Err(Error::Argument { .. })));
    }
    kernel
        .add(function("f", "", |(): ()| async { "no inputs" }))
        .unwrap();
    assert_eq!(whole(kernel.run::<String>("f", ())).unwrap(), "no inputs");
    kernel
        .add(function("g", "", |_: HashMap<String, String>| async {
            "none declared"
        }))
        .unwrap();
    assert!(kernel.run::<String>("g", args! { a: 1 }).check().is_err());
}

#[test]
fn ke_213_a_function_may_take_its_call_and_give_a_stream() {
    let kernel = Kernel::new();
    kernel
        .add(function("count", "", |add: Add, call: Call| async move {
            assert!(call.want.ports.has(""));
            StreamOf(stream::iter(0..add.a))
        }))
        .unwrap();
    assert_eq!(
        whole(kernel.run::<Json<i64>>("count", args! { a: 3 })).unwrap(),
        [0, 1, 2]
    );
}

#[tokio::test]
async fn ke_139_blocking_code_runs_on_another_thread() {
    let kernel = Kernel::new();
    let here = std::thread::current().id();
    kernel
        .add(function(
            "b",
            "",
            blocking(move |add: Add| (std::thread::current().id() != here) && add.a == 1),
        ))
        .unwrap();
    assert_eq!(
        kernel.run::<String>("b", args! { a: 1 }).await.unwrap(),
        "true"
    );
    kernel
        .add(function(
            "p",
            "",
            blocking(|_: Add| -> String { panic!("secret") }),
        ))
        .unwrap();
    let error = kernel.run::<String>("p", args! { a: 1 }).await.unwrap_err();
    assert!(
        matches!(&error, Error::Panicked { function } if *function == "p"),
        "{error:?}"
    );
}

#[test]
fn ke_102_blocking_code_without_a_runtime_is_an_error() {
    let kernel = Kernel::new();
    kernel.add(function("b", "", blocking(|_: Add| 1))).unwrap();
    assert!(matches!(
        whole(kernel.run::<String>("b", args! { a: 1 })),
        Err(Error::Unavailable { .. })
    ));
}

#[test]
fn ke_r16_a_value_that_cannot_stream_is_one_update_equal_to_its_whole() {
    let kernel = Kernel::new();
    kernel
        .add(function("whole", "", |(): ()| async { "all at once" }))
        .unwrap();
    let updates: Vec<_> = block_on(
        kernel
            .run::<String>("whole", ())
            .map(Result::unwrap)
            .collect(),
    );
    assert_eq!(updates, [whole(kernel.run::<String>("whole", ())).unwrap()]);
}

/// What a program shares with its functions.
#[derive(Clone)]
struct Greeting(&'static str);

#[derive(serde::Deserialize, JsonSchema)]
struct Whom {
    name: String,
}

fn greet() -> Fun {
    let greet = |State(greeting): State<Greeting>, whom: Whom| async move {
        format!("{} {}", greeting.0, whom.name)
    };
    function("greet", "Greets.", greet)
}

#[test]
fn a_function_takes_the_state_of_its_kernel() {
    let kernel = Kernel::new();
    kernel.set_state(Greeting("Hello"));
    kernel.add(greet()).unwrap();
    let run = || whole(kernel.run::<String>("greet", args!(name: "Ada"))).unwrap();
    assert_eq!(run(), "Hello Ada");
    kernel.set_state(Greeting("Good morning"));
    assert_eq!(run(), "Good morning Ada");
}

#[test]
fn state_and_call_together() {
    let kernel = Kernel::new();
    kernel.set_state(Greeting("Hello"));
    let nested = |State(greeting): State<Greeting>, whom: Whom, call: Call| async move {
        let run = call.kernel().run::<String>("inner", args!(name: whom.name));
        Ok::<_, Error>(format!("{}: {}", greeting.0, run.await?))
    };
    let inner = |whom: Whom| async move { whom.name.to_uppercase() };
    kernel.add(function("outer", "", nested)).unwrap();
    kernel.add(function("inner", "", inner)).unwrap();
    let run = kernel.run::<String>("outer", args!(name: "Ada"));
    assert_eq!(whole(run).unwrap(), "Hello: ADA");
}

#[test]
fn a_scope_has_the_state_of_the_kernel_around_it_or_its_own() {
    let kernel = Kernel::new();
    kernel.set_state(Greeting("Hello"));
    let (plain, own) = (kernel.scope(), kernel.scope());
    own.set_state(Greeting("Hi"));
    for (scope, expected) in [(&plain, "Hello Ada"), (&own, "Hi Ada")] {
        scope.add(greet()).unwrap();
        let run = scope.run::<String>("greet", args!(name: "Ada"));
        assert_eq!(whole(run).unwrap(), expected);
    }
    assert!(kernel.state::<Greeting>().is_some());
    assert!(kernel.state::<u32>().is_none());
}

#[test]
fn a_function_without_its_state_is_not_registered() {
    let kernel = Kernel::new();
    let error = kernel.add(greet()).unwrap_err().to_string();
    assert!(
        error.contains("Greeting") && error.contains("set_state"),
        "{error}"
    );
    assert!(kernel.replace(greet()).is_some(), "it is given back");
    let unregistered = greet().run::<String>(&kernel, args!(name: "Ada"));
    let error = whole(unregistered).unwrap_err().to_string();
    assert!(error.contains("set_state"), "{error}");
}
