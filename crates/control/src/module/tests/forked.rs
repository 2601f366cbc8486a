//! AI-711, AI-712: the steps in the documentation of [`module`](crate::module) copy an instance exactly.
//!
//! A random module and a random list of calls run three times: the original module, the instrumented one, and a fork of that
//! one made between two calls. All of them return the same values and trap at the same places.

use proptest::prelude::*;
use wasmtime::{Config, Engine, Func, Instance, Memory, Module, OptLevel, Ref, Store, Table, Val};

use super::super::ForkLayout;
use super::{accepted, controller};

/// One statement. Addresses and indices are small, so that statements meet; some of them trap.
fn statement() -> impl Strategy<Value = String> {
    let leaf = prop_oneof![
        (1..9i32)
            .prop_map(|n| format!("(global.set $n (i32.add (global.get $n) (i32.const {n})))")),
        Just("(global.set $w (i64.mul (global.get $w) (i64.const 3)))".to_owned()),
        Just("(global.set $v (v128.not (global.get $v)))".to_owned()),
        ("[abc]", 0..3u32).prop_map(|(f, i)| {
            format!(
                "(global.set $f (ref.func ${f})) (table.set $t (i32.const {i}) (global.get $f))"
            )
        }),
        (0..6u32).prop_map(|i| format!("(table.set $u (i32.const {i}) (global.get $f))")),
        (0..6u32).prop_map(|a| format!("(i32.store (i32.const {}) (global.get $n))", a * 30_000)),
        passive().prop_map(|i| format!("(data.drop {i})")),
        passive().prop_map(|i| format!("(elem.drop {i})")),
        (passive(), 0..3u32).prop_map(|(i, n)| {
            format!("(memory.init {i} (i32.const 700) (i32.const 0) (i32.const {n}))")
        }),
        (passive(), 0..3u32).prop_map(|(i, n)| {
            format!("(table.init $u {i} (i32.const 1) (i32.const 0) (i32.const {n}))")
        }),
        Just("(drop (table.grow $u (ref.func $c) (i32.const 1)))".to_owned()),
        Just("(table.copy $u $t (i32.const 0) (i32.const 1) (i32.const 2))".to_owned()),
        Just("(table.fill $t (i32.const 2) (ref.null func) (i32.const 1))".to_owned()),
        (0..6u32).prop_map(|i| {
            format!("(global.set $n (call_indirect $u (type $value) (i32.const {i})))")
        }),
        (0..4u32).prop_map(|i| {
            format!("(global.set $n (call_indirect $t (type $value) (i32.const {i})))")
        }),
        Just("(drop (memory.grow (i32.const 1)))".to_owned()),
        Just("(unreachable)".to_owned()),
    ];
    (leaf, any::<bool>()).prop_map(|(statement, conditional)| {
        if conditional {
            format!("(if (i32.and (global.get $n) (i32.const 1)) (then {statement}))")
        } else {
            statement
        }
    })
}

/// The index of a segment, mostly of one that is there until it is dropped.
fn passive() -> impl Strategy<Value = u32> {
    prop::sample::select(vec![1, 1, 1, 3, 0])
}

/// A module with this many exported functions, `f0` and so on.
const FUNCTIONS: usize = 5;

fn module() -> impl Strategy<Value = Vec<u8>> {
    let function = prop::collection::vec(statement(), 1..5);
    let functions = prop::collection::vec(function, FUNCTIONS);
    (functions, any::<bool>()).prop_map(|(functions, start)| {
        let functions: Vec<String> = (functions.iter().enumerate())
            .map(|(index, code)| format!(r#"(func (export "f{index}") {})"#, code.join(" ")))
            .collect();
        let start = if start { "(start $s)" } else { "" };
        let fields = format!(
            r#"
            (type $value (func (result i32)))
            (global $n (export "n") (mut i32) (i32.const 1)) (global $w (export "w") (mut i64) (i64.const 7))
            (global $v (export "v") (mut v128) (v128.const i64x2 1 2)) (global $f (mut funcref) (ref.null func))
            (global $x (mut externref) (ref.null extern)) (global $k i32 (i32.const 3))
            (table $t 4 funcref) (table $u 4 9 funcref)
            (elem (table $t) (i32.const 1) func $a $b) (elem func $b $c)
            (elem declare func $a $b $c) (elem funcref (ref.null func) (ref.func $a))
            (data (i32.const 30000) "active") (data "pq") (data (offset (i32.add (i32.const 9) (i32.const 1))) "x") (data "r")
            (func $a (type $value) (i32.const 11)) (func $b (type $value) (i32.add (global.get $n) (i32.const 2)))
            (func $c (type $value) (i32.load (i32.const 30000)))
            (func $s (global.set $n (i32.const 100)) (i32.store (i32.const 60000) (i32.const 5)))
            {start} {}"#,
            functions.join("\n")
        );
        controller("", &fields)
    })
}

/// An instance that the test calls.
struct Running {
    store: Store<()>,
    instance: Instance,
}

impl Running {
    /// As the host does, for a module that it has instrumented; an original one starts by itself.
    fn start(engine: &Engine, module: &Module, layout: Option<&ForkLayout>) -> Self {
        let mut running = Self::instantiate(engine, module);
        if let Some(start) = layout.and_then(|layout| layout.start.as_ref()) {
            running.call(start).unwrap();
        }
        running
    }

    fn instantiate(engine: &Engine, module: &Module) -> Self {
        let mut store = Store::new(engine, ());
        let instance = Instance::new(&mut store, module, &[]).unwrap();
        Self { store, instance }
    }

    fn call(&mut self, name: &str) -> Result<(), String> {
        let function = self
            .instance
            .get_typed_func::<(), ()>(&mut self.store, name)
            .unwrap();
        let trapped =
            |error: wasmtime::Error| error.downcast::<wasmtime::Trap>().unwrap().to_string();
        function.call(&mut self.store, ()).map_err(trapped)
    }

    fn memory(&mut self) -> Memory {
        self.instance.get_memory(&mut self.store, "memory").unwrap()
    }

    fn table(&mut self, name: &str) -> Table {
        self.instance.get_table(&mut self.store, name).unwrap()
    }

    /// What the host can see from outside.
    fn state(&mut self) -> (String, Vec<u8>) {
        let globals = ["n", "w", "v"].map(|name| {
            let global = self.instance.get_global(&mut self.store, name).unwrap();
            format!("{:?}", global.get(&mut self.store))
        });
        let memory = self.memory();
        (globals.join(" "), memory.data(&self.store).to_vec())
    }

    /// The documented steps.
    fn fork(&mut self, engine: &Engine, module: &Module, layout: &ForkLayout) -> Self {
        let mut child = Self::instantiate(engine, module);
        let (from, to) = (self.memory(), child.memory());
        let pages = from.size(&self.store) - to.size(&child.store);
        to.grow(&mut child.store, pages).unwrap();
        to.data_mut(&mut child.store)
            .copy_from_slice(from.data(&self.store));
        for name in &layout.globals {
            let from = self.instance.get_global(&mut self.store, name).unwrap();
            let to = child.instance.get_global(&mut child.store, name).unwrap();
            let value = match from.get(&mut self.store) {
                Val::FuncRef(function) => {
                    Val::FuncRef(self.translate(&mut child, layout, function))
                }
                Val::ExternRef(reference) => {
                    assert!(reference.is_none());
                    Val::ExternRef(None)
                }
                value => value,
            };
            to.set(&mut child.store, value).unwrap();
        }
        for table in layout.tables.iter().filter(|table| table.written) {
            let (from, to) = (self.table(&table.export), child.table(&table.export));
            let more = from.size(&self.store) - to.size(&child.store);
            to.grow(&mut child.store, more, Ref::Func(None)).unwrap();
            for index in 0..from.size(&self.store) {
                let Some(Ref::Func(function)) = from.get(&mut self.store, index) else {
                    panic!("a table of functions");
                };
                let function = self.translate(&mut child, layout, function);
                to.set(&mut child.store, index, Ref::Func(function))
                    .unwrap();
            }
        }
        if let Some(redrop) = &layout.redrop {
            child.call(redrop).unwrap();
        }
        child
    }

    /// The child's function that the parent's stands for.
    fn translate(
        &mut self,
        child: &mut Self,
        layout: &ForkLayout,
        function: Option<Func>,
    ) -> Option<Func> {
        let address = function?.to_raw(&mut self.store);
        let name = layout.functions.iter().find(|name| {
            let exported = self.instance.get_func(&mut self.store, name).unwrap();
            exported.to_raw(&mut self.store) == address
        });
        child.instance.get_func(&mut child.store, name.unwrap())
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(16) })]

    #[test]
    fn ai_711_a_fork_goes_on_like_its_parent(
        bytes in module(),
        calls in prop::collection::vec(0..FUNCTIONS, 8..40),
        fork in any::<prop::sample::Index>(),
    ) {
        let checked = accepted(&bytes);
        let mut config = Config::new();
        // Compiling is what takes the time of this test.
        config.cranelift_opt_level(OptLevel::None);
        let engine = Engine::new(&config).unwrap();
        let original = Module::new(&engine, &bytes).unwrap();
        let instrumented = Module::new(&engine, &checked.instrumented).unwrap();
        let mut plain = Running::start(&engine, &original, None);
        let mut parent = Running::start(&engine, &instrumented, Some(&checked.layout));
        let mut child = None;
        let fork = fork.index(calls.len());
        for (position, call) in calls.iter().enumerate() {
            if position == fork {
                child = Some(parent.fork(&engine, &instrumented, &checked.layout));
            }
            let name = format!("f{call}");
            let expected = plain.call(&name);
            let state = plain.state();
            prop_assert_eq!(&parent.call(&name), &expected, "instrumented");
            prop_assert!(parent.state() == state, "instrumented");
            if let Some(child) = &mut child {
                prop_assert_eq!(&child.call(&name), &expected, "forked");
                prop_assert!(child.state() == state, "forked");
            }
        }
    }
}
